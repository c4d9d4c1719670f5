// Runs pack.cu on a CPU, warp by warp, and watches its accesses.
//
// The 32 lanes of a warp are fibers with stacks of their own. A lane runs until a shuffle. There it
// leaves its value and waits until every other lane has arrived. If some lanes end or shuffle while
// others do not, they have diverged, which is undefined on a device. The emulation checks that loads
// and stores of blocks stay in their memory. It counts stores byte by byte.

#include <ucontext.h>

#include <cstdint>
#include <cstring>

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

// The memory of a launch, and what it did. The tests declare an equal structure.
struct Watch {
    std::uint64_t source_begin, source_end, target_begin, target_end;
    std::uint16_t* num_stores;  // for each byte from target_begin
    std::uint64_t num_outside, num_misaligned, num_diverged, num_endless;
}* watch;

template <typename Unit>
bool is_inside(const Unit* address, std::uint64_t begin, std::uint64_t end) {
    auto first = reinterpret_cast<std::uint64_t>(address);
    watch->num_misaligned += first % sizeof(Unit) != 0;
    bool inside = first >= begin && first <= end - sizeof(Unit);
    watch->num_outside += !inside;
    return inside;
}

template <typename Unit>
Unit __ldcs(const Unit* address) {
    Unit unit{};
    if (is_inside(address, watch->source_begin, watch->source_end)) {
        std::memcpy(&unit, reinterpret_cast<const void*>(address), sizeof(Unit));
    }
    return unit;
}

template <typename Unit>
void __stcg(Unit* address, Unit unit) {
    if (!is_inside(address, watch->target_begin, watch->target_end)) return;
    std::memcpy(reinterpret_cast<void*>(address), &unit, sizeof(Unit));
    auto first = reinterpret_cast<std::uint64_t>(address) - watch->target_begin;
    for (std::size_t i = 0; i < sizeof(Unit); ++i) ++watch->num_stores[first + i];
}

void atomicAdd(unsigned long long* address, unsigned long long value) { *address += value; }

constexpr unsigned int NUM_LANES = 32;
// No test needs more shuffles of a warp. Beyond this the kernel loops forever.
constexpr unsigned int MAX_SHUFFLES = 1 << 14;

struct Lane {
    ucontext_t context;
    alignas(16) char stack[256 << 10];
    // Values of this shuffle and the previous one, because a lane may reach the next shuffle before
    // all lanes have read this one.
    std::uint64_t left[2];
    unsigned int num_shuffles;
    bool has_ended;
} lanes[NUM_LANES];
ucontext_t scheduler;
unsigned int current;

template <typename Value>
Value exchange(unsigned int mask, Value value, unsigned int from) {
    watch->num_diverged += mask != 0xffffffffu;
    Lane& self = lanes[current];
    unsigned int turn = self.num_shuffles++ % 2;
    std::memcpy(&self.left[turn], &value, sizeof(Value));
    swapcontext(&self.context, &scheduler);
    if (from < NUM_LANES) std::memcpy(&value, &lanes[from].left[turn], sizeof(Value));
    return value;
}

template <typename Value>
Value __shfl_down_sync(unsigned int mask, Value value, unsigned int distance) {
    return exchange(mask, value, current + distance);
}

}  // namespace

#include KERNELS

namespace {

struct Arguments {
    const Chunk* chunks;
    unsigned long long num_chunks;
    const Ids* ids;
    unsigned long long num_blocks;
    unsigned char* staging;
    unsigned long long staging_stride;
    unsigned long long* checksums;
};

decltype(&gather) kernel;
const Arguments* arguments;

void run_lane() {
    const Arguments& a = *arguments;
    kernel(a.chunks, a.num_chunks, *a.ids, a.num_blocks, a.staging, a.staging_stride, a.checksums);
    lanes[current].has_ended = true;
}

// Runs every lane to its next shuffle or its end. Returns whether all are at the same shuffle.
bool advance(unsigned int warp) {
    for (current = 0; current < NUM_LANES; ++current) {
        threadIdx.x = warp * NUM_LANES + current;
        swapcontext(&scheduler, &lanes[current].context);
    }
    for (const Lane& lane : lanes) {
        if (lane.has_ended != lanes[0].has_ended || lane.num_shuffles != lanes[0].num_shuffles) {
            return false;
        }
    }
    return true;
}

void run_warp(unsigned int warp) {
    for (Lane& lane : lanes) {
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack;
        lane.context.uc_stack.ss_size = sizeof lane.stack;
        lane.context.uc_link = &scheduler;
        lane.num_shuffles = 0;
        lane.has_ended = false;
        makecontext(&lane.context, run_lane, 0);
    }
    do {
        if (!advance(warp)) {
            ++watch->num_diverged;
            return;
        }
        if (lanes[0].num_shuffles == MAX_SHUFFLES) {
            ++watch->num_endless;
            return;
        }
    } while (!lanes[0].has_ended);
}

}  // namespace

// Runs the thread blocks from `begin` to `end - 1` of a grid of `num_ctas`.
extern "C" void launch(bool is_gather, unsigned int num_ctas, unsigned int num_threads,
                       unsigned int begin, unsigned int end, const Arguments* given,
                       Watch* watched) {
    kernel = is_gather ? gather : scatter;
    arguments = given;
    watch = watched;
    gridDim.x = num_ctas;
    blockDim.x = num_threads;
    for (blockIdx.x = begin; blockIdx.x < end; ++blockIdx.x) {
        for (unsigned int warp = 0; warp < num_threads / NUM_LANES; ++warp) run_warp(warp);
    }
}
