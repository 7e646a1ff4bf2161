// Run operations in order on several threads, alone or as a recorded program. Compiled for every x86.
//
// Threads wait for parts, not for threads: an operation starts as soon as all parts of the previous one are done. A
// thread
// that wakes late, or is preempted between two parts, delays no other thread.
#include "operation.h"

#include <emmintrin.h>
#include <sched.h>
#include <stdlib.h>

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "processor.h"

namespace {

constexpr int SPINS = 500;  // about 40 cycles each, longer than a part takes; then yield the processor

struct alignas(64) Progress {
    std::atomic<int64_t> taken{0}, done{0};
};

struct FreeMemory {
    void operator()(uint8_t* memory) const { free(memory); }
};
using Memory = std::unique_ptr<uint8_t, FreeMemory>;

Memory allocated(size_t bytes) { return Memory((uint8_t*)aligned_alloc(64, (bytes + 63) / 64 * 64)); }

size_t max_shared(const Operation* operations, int count) {
    size_t bytes = 64;
    for (int i = 0; i < count; i++) bytes = operations[i].shared_bytes > bytes ? operations[i].shared_bytes : bytes;
    return bytes;
}

void wait_for(const Progress& progress, int64_t parts) {
    for (int spins = 0; progress.done.load(std::memory_order_acquire) < parts; spins++)
        if (spins < SPINS)
            _mm_pause();
        else
            sched_yield();
}

void take_parts(const Operation& operation, Progress& progress, uint8_t* shared) {
    while (progress.taken.load(std::memory_order_relaxed) < operation.parts) {
        const int64_t first = progress.taken.fetch_add(operation.chunk, std::memory_order_relaxed);
        if (first >= operation.parts) return;
        const int64_t after = first + operation.chunk, end = after < operation.parts ? after : operation.parts;
        operation.run(operation.body, first, end, shared);
        progress.done.fetch_add(end - first, std::memory_order_release);
    }
}

void run(const Operation* operations, Progress* progress, int count, uint8_t* shared, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    for (int i = 0; i < count; i++) {
        take_parts(operations[i], progress[i], shared);
        wait_for(progress[i], operations[i].parts);
    }
}

struct Program {
    std::vector<Operation> operations;
    std::unique_ptr<Progress[]> progress;
    Memory shared;
};

thread_local Program* recorded = nullptr;

// Per-thread memory kept across calls: allocating 100 KB costs as much as quantizing into it.
uint8_t* kept_memory(size_t bytes) {
    static thread_local Memory memory;
    static thread_local size_t size = 0;
    if (size < bytes) {
        memory = allocated(bytes);
        size = memory ? bytes : 0;
    }
    return memory.get();
}

}  // namespace

bool perform(const Operation* operations, int count, int num_threads) {
    if (recorded) {
        recorded->operations.insert(recorded->operations.end(), operations, operations + count);
        return true;
    }
    uint8_t* shared = kept_memory(max_shared(operations, count));
    if (!shared) return false;
    if (num_threads == 1) {
        for (int i = 0; i < count; i++) operations[i].run(operations[i].body, 0, operations[i].parts, shared);
        return true;
    }
    for (int first = 0; first < count; first += 4) {
        Progress progress[4];
        run(operations + first, progress, count - first < 4 ? count - first : 4, shared, num_threads);
    }
    return true;
}

// Operations performed by this thread are recorded, not executed, until the recording ends.
PAGESTREAM_EXPORT void pagestream_begin_recording() {
    delete recorded;
    recorded = new Program;
}

// Return the program, or null if out of memory.
PAGESTREAM_EXPORT Program* pagestream_end_recording() {
    std::unique_ptr<Program> program(recorded);
    recorded = nullptr;
    const int count = (int)program->operations.size();
    program->shared = allocated(max_shared(program->operations.data(), count));
    program->progress.reset(new (std::nothrow) Progress[count]);
    return program->shared && program->progress ? program.release() : nullptr;
}

PAGESTREAM_EXPORT int pagestream_program_size(const Program* program) { return (int)program->operations.size(); }

PAGESTREAM_EXPORT void pagestream_run_program(Program* program, int num_threads) {
    const int count = (int)program->operations.size();
    for (int i = 0; i < count; i++) {
        program->progress[i].taken.store(0, std::memory_order_relaxed);
        program->progress[i].done.store(0, std::memory_order_relaxed);
    }
    run(program->operations.data(), program->progress.get(), count, program->shared.get(), num_threads);
}

PAGESTREAM_EXPORT void pagestream_free_program(Program* program) { delete program; }
