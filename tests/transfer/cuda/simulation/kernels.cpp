// Runs the kernels of pack.cu for the simulated GPU, and passes on each access to memory.
//
// The 32 lanes of a warp are fibers, as in emulated_cuda.cpp. A lane runs until a shuffle, and goes
// on when all lanes are there. The fibers are made once, and each runs one lane after the other.

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

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

Touch touch;
jmp_buf scheduler;
bool has_trapped;

// Notes an access, or ends the kernel. With a wrong table it might go on for hours.
template <typename Unit>
void note(const Unit* address, bool is_write) {
    auto first = reinterpret_cast<std::uint64_t>(address);
    if (touch(first, first % sizeof(Unit) ? 0 : sizeof(Unit), is_write)) return;
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

struct Lane {
    ucontext_t context;
    jmp_buf resume;
    alignas(16) char stack[64 << 10];
    std::uint64_t left[2];  // values of this shuffle and the previous one
    unsigned int num_shuffles;
    bool has_ended, is_made;
} lanes[NUM_LANES];
unsigned int current;
const std::function<void()>* kernel;

void leave() {
    if (!_setjmp(lanes[current].resume)) _longjmp(scheduler, 1);
}

void run_lanes() {
    for (;;) {
        (*kernel)();
        lanes[current].has_ended = true;
        leave();
    }
}

void enter(Lane& lane) {
    if (_setjmp(scheduler)) return;
    if (lane.is_made) _longjmp(lane.resume, 1);
    lane.is_made = true;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack;
    lane.context.uc_stack.ss_size = sizeof lane.stack;
    makecontext(&lane.context, run_lanes, 0);
    setcontext(&lane.context);
}

template <typename Value>
Value exchange(Value value, unsigned int from) {
    Lane& self = lanes[current];
    unsigned int turn = self.num_shuffles++ % 2;
    std::memcpy(&self.left[turn], &value, sizeof(Value));
    leave();
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
    kernel = &launched.lane;
    touch = on_touch;
    has_trapped = false;
    gridDim.x = num_ctas;
    blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x < num_ctas; ++blockIdx.x) {
        for (unsigned int warp = 0; warp < num_threads / NUM_LANES; ++warp) {
            for (Lane& lane : lanes) {
                lane.has_ended = false;
                lane.num_shuffles = 0;
            }
            for (unsigned int num_ended = 0; num_ended < NUM_LANES;) {
                num_ended = 0;
                for (current = 0; current < NUM_LANES; ++current) {
                    threadIdx.x = warp * NUM_LANES + current;
                    if (!lanes[current].has_ended) enter(lanes[current]);
                    if (has_trapped) {
                        for (Lane& lane : lanes) lane.is_made = false;  // they begin anew
                        return;
                    }
                    num_ended += lanes[current].has_ended;
                }
            }
        }
    }
}
