// Calls of the kernels on a piece of memory: test_native_aarch64.py hands both to this program on another processor, and
// compares what the memory holds afterwards with what the same calls leave here.
//
// Input: how many bytes, pointers and calls; the memory, in which a pointer is an offset; where the pointers are; of each
// call which function it is of and where its job lies.  Output: the status of each call, and the memory.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>

struct Call {
    int64_t function, job;
};

static bool read_all(void *into, int64_t size) { return fread(into, 1, (size_t)size, stdin) == (size_t)size; }

static int32_t called(int64_t function, void *job) {
    switch (function) {
    case 0: return diloco_encode(0, (const Encode *)job);
    case 1: return diloco_decode(0, (const Decode *)job);
    case 2: return diloco_measure(0, (Measure *)job);
    case 3: return diloco_outer(0, (Outer *)job);
    case 4: return diloco_seal(0, (Seal *)job);
    case 5: return diloco_follow(0, (Follow *)job);
    default: return diloco_take(0, (const Take *)job);
    }
}

int main() {
    int64_t sizes[3];
    if (!read_all(sizes, sizeof sizes)) return 1;
    const auto [bytes, pointers, calls] = sizes;
    char *memory = (char *)aligned_alloc(64, (size_t)bytes);
    int64_t *places = (int64_t *)malloc(8 * (size_t)pointers);
    Call *jobs = (Call *)malloc(sizeof(Call) * (size_t)calls);
    int32_t *statuses = (int32_t *)malloc(4 * (size_t)calls);
    if (!read_all(memory, bytes) || !read_all(places, 8 * pointers) || !read_all(jobs, sizeof(Call) * calls)) return 1;
    const auto shift = [&](uint64_t by) {
        for (int64_t i = 0; i < pointers; i++) *(uint64_t *)(memory + places[i]) += by;
    };
    shift((uint64_t)memory);
    for (int64_t i = 0; i < calls; i++) statuses[i] = called(jobs[i].function, memory + jobs[i].job);
    shift(-(uint64_t)memory);
    return fwrite(statuses, 4, (size_t)calls, stdout) != (size_t)calls || fwrite(memory, 1, (size_t)bytes, stdout) != (size_t)bytes;
}
