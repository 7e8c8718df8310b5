// Threads that wait for work, and the entry points that Python calls. A step takes milliseconds and has some two hundred barriers, so threads spin at
// first and sleep only when nothing comes for a while; they yield when others want the processor.
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "decoder.h"

namespace {

struct Barrier {
    std::atomic<int> arrived{0}, phase{0};
    int size = 1;
    void wait() {
        int mine = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            phase.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase.load(std::memory_order_acquire) == mine; spins++)
            if (spins < 4000) _mm_pause();
            else sched_yield();
    }
};

struct Pool {
    Barrier barrier;
    std::atomic<int> job{0};
    void (*work)(void*, int rank) = nullptr;
    void* argument = nullptr;
    int size = 1;
    pid_t owner = 0;

    void loop(int rank) {
        for (int done = 0;; done++) {
            for (int spins = 0; job.load(std::memory_order_acquire) == done; spins++)
                if (spins < 20000) _mm_pause();
                else job.wait(done);
            work(argument, rank);
            barrier.wait();
        }
    }

    void run(int wanted, void (*with)(void*, int), void* what) {
        if (wanted != size || owner != getpid()) std::abort();
        work = with, argument = what;
        if (size > 1) {
            job.fetch_add(1, std::memory_order_release);
            job.notify_all();
        }
        with(what, 0);
        if (size > 1) barrier.wait();
    }
};

std::mutex lock;
std::vector<Pool*> pools;  // one a size; never destroyed, since their threads never end

Pool* pool_of(int size) {
    for (Pool* pool : pools)
        if (pool->size == size && pool->owner == getpid()) return pool;
    Pool* pool = new Pool;  // a forked process has none of its parent's threads, and starts its own
    pool->size = pool->barrier.size = size;
    pool->owner = getpid();
    for (int rank = 1; rank < size; rank++) std::thread(&Pool::loop, pool, rank).detach();
    pools.push_back(pool);
    return pool;
}

void barrier_of(void* pool) { ((Pool*)pool)->barrier.wait(); }

struct Scratch {
    char* data = nullptr;
    int64_t size = 0;
    char* reserve(int64_t bytes) {
        if (bytes > size) {
            free(data);
            size = (bytes + 4095) / 4096 * 4096;
            data = (char*)aligned_alloc(4096, size);
        }
        return data;
    }
} scratch;

struct Call {
    const Level* level;
    const Model* model;
    const Cache* cache;
    const Step* step;
    const Matrix* matrix;
    const float* x;
    float* y;
    int64_t tokens, stride;
    char *shared, *own;
    Pool* pool;
};

void do_forward(void* argument, int rank) {
    Call* call = (Call*)argument;
    Team team = {rank, call->pool->size, barrier_of, call->pool};
    call->level->forward(call->model, call->cache, call->step, call->shared, call->own + rank * call->stride, &team);
}

void do_multiply(void* argument, int rank) {
    Call* call = (Call*)argument;
    Team team = {rank, call->pool->size, barrier_of, call->pool};
    call->level->multiply(call->matrix, call->x, call->y, call->tokens, call->own + rank * call->stride, &team);
}

const Level* levels[] = {&level_avx2, &level_avx512};

int64_t rounded(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

extern "C" {

// Bit i is set where this processor can run levels[i].
int assay_levels() {
    __builtin_cpu_init();
    int found = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= 1;
    if (__builtin_cpu_supports("avx512f") && (found & 1)) found |= 2;
    return found;
}

int assay_sizes(int which) {
    const int sizes[] = {sizeof(Matrix), sizeof(Block), sizeof(Model), sizeof(Cache), sizeof(Step), sizeof(Ready)};
    return sizes[which];
}

void assay_forward(int level, int threads, const Model* model, const Cache* cache, const Step* step) {
    std::lock_guard<std::mutex> hold(lock);
    Call call = {};
    call.level = levels[level], call.model = model, call.cache = cache, call.step = step, call.pool = pool_of(threads);
    int64_t common = rounded(call.level->shared_bytes(model, step->tokens, step->kept));
    call.stride = rounded(call.level->private_bytes(model, cache, step->tokens > step->kept ? step->tokens : step->kept));
    call.shared = scratch.reserve(common + threads * call.stride);
    call.own = call.shared + common;
    call.pool->run(threads, do_forward, &call);
}

void assay_ready(int level, const Ready* how, float* x, int64_t rows, int64_t width) {
    std::lock_guard<std::mutex> hold(lock);
    float* own = (float*)scratch.reserve(rounded(width * 4));
    for (int64_t row = 0; row < rows; row++) levels[level]->ready(*how, x + row * width, width, own);
}

void assay_multiply(int level, int threads, const Matrix* matrix, const float* x, float* y, int64_t tokens) {
    std::lock_guard<std::mutex> hold(lock);
    Call call = {};
    call.level = levels[level], call.matrix = matrix, call.x = x, call.y = y, call.tokens = tokens, call.pool = pool_of(threads);
    call.stride = rounded(call.level->multiply_bytes(matrix, tokens));
    call.own = scratch.reserve(threads * call.stride);
    call.pool->run(threads, do_multiply, &call);
}
}
