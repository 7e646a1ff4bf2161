// Work in parts that threads share, for any instruction set. program.cpp runs it now or records it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

// Parts may run in any order on any thread: each writes only what no other part reads or writes.
struct Operation {
    static constexpr size_t ROOM = 192;
    void (*run)(const void* body, int64_t first, int64_t end, uint8_t* shared);
    int64_t parts;
    int64_t chunk;         // parts that a thread takes at once
    size_t shared_bytes;   // scratch memory passed to later operations of the same perform()
    alignas(16) unsigned char body[ROOM];
};

// Run operations in order, each with up to `num_threads` threads, or append them to the program being recorded. Returns
// false if out of memory.
bool perform(const Operation* operations, int count, int num_threads);

namespace {

// Copies `body`(part, shared): values captured by copy are frozen, memory behind captured pointers is read when it
// runs.
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

// Run one operation. A single thread takes all parts at once.
template <class Body>
void perform_parts(int64_t parts, int64_t chunk, int num_threads, const Body& body) {
    const Operation made = operation(parts, num_threads > 1 ? chunk : parts, body);
    perform(&made, 1, num_threads);
}

}  // namespace
