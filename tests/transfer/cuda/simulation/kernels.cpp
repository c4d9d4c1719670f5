// Runs the kernels of pack.cu for the simulated GPU, and passes on each access to memory.
//
// The 32 lanes of a warp run on fibers, as in emulated_cuda.cpp. A lane runs until a shuffle, and
// goes on when all lanes are there. The fibers are made once. If a lane ends without a shuffle, its
// fiber runs the next lane at once, because most lanes of a launch have little or nothing to do.

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__

namespace {

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

struct Index {
    unsigned int x;
} threadIdx, blockIdx, blockDim, gridDim;

Touch may_touch;
jmp_buf scheduler;
bool has_trapped;

// Notes an access, or ends the kernel. With a wrong table it might go on for hours.
template <typename Unit>
void note(const Unit* address, bool is_write) {
    auto first = reinterpret_cast<std::uint64_t>(address);
    if (may_touch(first, first % sizeof(Unit) ? 0 : sizeof(Unit), is_write)) return;
    has_trapped = true;
    _longjmp(scheduler, 1);
}

template <typename Unit>
Unit read(const Unit* address) {
    note(address, false);
    Unit unit;
    std::memcpy(&unit, address, sizeof(Unit));
    return unit;
}

template <typename Unit>
void write(Unit* address, const Unit& unit) {
    note(address, true);
    std::memcpy(address, &unit, sizeof(Unit));
}

// The accesses with a cache hint, which changes only their speed.
template <typename Unit> Unit __ldcs(const Unit* address) { return read(address); }
template <typename Unit> Unit __ldcg(const Unit* address) { return read(address); }
template <typename Unit> Unit __ldg(const Unit* address) { return read(address); }
template <typename Unit> void __stcs(Unit* address, Unit unit) { write(address, unit); }
template <typename Unit> void __stcg(Unit* address, Unit unit) { write(address, unit); }

void atomicAdd(unsigned long long* address, unsigned long long value) {
    write(address, read(address) + value);
}

constexpr unsigned int NUM_LANES = 32;

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    alignas(16) char stack[64 << 10];
    bool is_made;
} fibers[NUM_LANES];
std::vector<Fiber*> idle;  // fibers without a lane

struct Lane {
    Fiber* fiber;           // null before its begin
    std::uint64_t left[2];  // values of this shuffle and the previous one
    unsigned int num_shuffles;
    bool has_ended;
} lanes[NUM_LANES];
unsigned int current;
const std::function<void()>* kernel;

void leave(Fiber& fiber) {
    if (!_setjmp(fiber.resume)) _longjmp(scheduler, 1);
}

void run_lanes() {
    for (;;) {
        (*kernel)();
        Lane& lane = lanes[current];
        lane.has_ended = true;
        if (lane.num_shuffles == 0 && current + 1 < NUM_LANES) {
            lanes[++current].fiber = lane.fiber;
            ++threadIdx.x;
        } else {
            idle.push_back(lane.fiber);
            leave(*lane.fiber);
        }
    }
}

void enter(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.is_made) _longjmp(fiber.resume, 1);
    fiber.is_made = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = sizeof fiber.stack;
    makecontext(&fiber.context, run_lanes, 0);
    setcontext(&fiber.context);
}

template <typename Value>
Value exchange(Value value, unsigned int from) {
    Lane& self = lanes[current];
    unsigned int turn = self.num_shuffles++ % 2;
    std::memcpy(&self.left[turn], &value, sizeof(Value));
    leave(*self.fiber);
    if (from < NUM_LANES) std::memcpy(&value, &lanes[from].left[turn], sizeof(Value));
    return value;
}

template <typename Value>
Value __shfl_sync(unsigned int, Value value, unsigned int from) {
    return exchange(value, from % NUM_LANES);
}

template <typename Value>
Value __shfl_down_sync(unsigned int, Value value, unsigned int distance) {
    return exchange(value, current + distance);
}

}  // namespace

#include KERNELS

namespace {

template <typename... Parameters, std::size_t... I>
BoundKernel bound(void (*function)(Parameters...), void** arguments, std::index_sequence<I...>) {
    // Copied now, as at a launch. The widths are those of the kernel, whatever the host wrote.
    auto values = std::make_tuple(*static_cast<std::decay_t<Parameters>*>(arguments[I])...);
    // The kernels read the table without a cache hint, so it is checked as a whole.
    auto table = reinterpret_cast<std::uint64_t>(std::get<0>(values));
    return {[=] { std::apply(function, values); }, table, sizeof(Chunk) * std::get<1>(values)};
}

template <typename... Parameters>
BoundKernel bind(void (*function)(Parameters...), void** arguments) {
    return bound(function, arguments, std::index_sequence_for<Parameters...>());
}

}  // namespace

BoundKernel bind_kernel(const std::string& name, void** arguments) {
    if (name == "gather") return bind(gather, arguments);
    if (name == "scatter") return bind(scatter, arguments);
    return {};
}

void run_kernel(const BoundKernel& launched, unsigned int num_ctas, unsigned int num_threads,
                Touch on_touch) {
    if (!on_touch(launched.table, launched.table_bytes, false)) return;
    if (has_trapped || idle.empty()) {
        has_trapped = false;
        idle.clear();
        for (Fiber& fiber : fibers) {
            fiber.is_made = false;  // it begins anew
            idle.push_back(&fiber);
        }
    }
    kernel = &launched.lane;
    may_touch = on_touch;
    gridDim.x = num_ctas;
    blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x < num_ctas; ++blockIdx.x) {
        for (unsigned int warp = 0; warp < num_threads / NUM_LANES; ++warp) {
            for (Lane& lane : lanes) lane = {};
            do {
                for (current = 0; current < NUM_LANES; ++current) {
                    Lane& lane = lanes[current];
                    if (lane.has_ended) continue;
                    if (!lane.fiber) {
                        lane.fiber = idle.back();
                        idle.pop_back();
                    }
                    threadIdx.x = warp * NUM_LANES + current;
                    enter(*lane.fiber);
                    if (has_trapped) return;
                }
            } while (idle.size() < NUM_LANES);
        }
    }
}
