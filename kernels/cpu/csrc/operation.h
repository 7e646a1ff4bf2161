// Work in parts that threads share out, for any instruction set; program.cpp runs it, now or whenever a program is run.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

// Its parts may be done in any order and by any thread: each writes what no other one reads or writes.
struct Operation {
    static constexpr size_t ROOM = 192;
    void (*run)(const void* body, int64_t first, int64_t end, uint8_t* shared);
    int64_t parts;
    int64_t chunk;         // parts that a thread takes at a time
    size_t shared_bytes;   // of memory that operations hand to those after them in one perform()
    alignas(16) unsigned char body[ROOM];
};

// One after another, each with up to `num_threads` threads; where a program is recorded they become a part of it.
// False where memory is missing.
bool perform(const Operation* operations, int count, int num_threads);

namespace {

// `body`(part, shared): a copy of it is kept, so what it captured by value is as it was and what it points to as it will be.
template <class Body>
Operation operation(int64_t parts, int64_t chunk, const Body& body, size_t shared_bytes = 0) {
    static_assert(sizeof(Body) <= Operation::ROOM && std::is_trivially_copyable<Body>::value, "a body is copied as bytes");
    Operation made;
    made.run = [](const void* at, int64_t first, int64_t end, uint8_t* shared) {
        for (int64_t part = first; part < end; part++) (*(const Body*)at)(part, shared);
    };
    made.parts = parts;
    made.chunk = chunk > 1 ? chunk : 1;
    made.shared_bytes = shared_bytes;
    memcpy(made.body, &body, sizeof body);
    return made;
}

// One operation by itself. A thread alone takes all parts at once.
template <class Body>
void perform_parts(int64_t parts, int64_t chunk, int num_threads, const Body& body) {
    const Operation made = operation(parts, num_threads > 1 ? chunk : parts, body);
    perform(&made, 1, num_threads);
}

}  // namespace
