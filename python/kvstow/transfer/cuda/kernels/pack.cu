// Copies blocks between the device's cache, where a block is spread over many regions, and staging
// slots, each of which holds one whole block.
//
//   region 0   |block 0|pad|block 1|pad| ...     chunk: base + id * stride, num_bytes long
//   region 1   |block 0|pad|block 1|pad| ...
//   staging    |region 0, region 1, ... of block_ids[0]|pad|... of block_ids[1]|pad| ...
//                 chunk: staging + i * staging_stride + offset
//
// One warp copies one chunk of one block, and the warps of the grid take turns. A small grid leaves
// the other multiprocessors to the model. The result is correct for any grid, and for any thread
// block that consists of whole warps.
//
// The text has no barriers, shared memory or inline assembly. So with a few of CUDA's names defined
// it is plain C++, and the tests run it on a CPU as it is.

// A piece of one region, of at most 2**31 bytes. Pieces of 2 KiB keep a warp's turn short.
struct Chunk {
    unsigned long long base;    // address of this piece of block 0
    unsigned long long stride;  // bytes from one block to the next
    unsigned int offset;        // where the piece lies in a slot
    unsigned int num_bytes;
};
static_assert(sizeof(Chunk) == 24, "the host builds the table with this layout");

// The ids of a launch, which the launch itself carries. So no kernel reads them over the link, and
// the host need not keep them. With the other arguments they fit into the 4 KiB that any GPU takes.
constexpr unsigned int MAX_BLOCKS = 960;
struct Ids {
    int of[MAX_BLOCKS];
};
static_assert(sizeof(Ids) == 3840, "the host passes the ids with this size");

constexpr unsigned int LANES = 32;
constexpr unsigned int ALL_LANES = 0xffffffffu;
// Loads that a lane issues before its first store. Device memory answers in some 0.7 us, and the
// rate is the bytes in flight (2 KiB per warp) divided by that time. The few bytes at the end of a
// chunk need no more than one load.
constexpr unsigned int WIDE_IN_FLIGHT = 4;

// The factor of a slot's 4-byte word `index` in the checksum. It is never 0, and no two are equal:
// to add 1, to multiply by an odd number, and the shifted exclusive or are bijections of 32 bits,
// and the last two map only 0 to 0. The upper half is folded into the lower because the factors
// would otherwise be an arithmetic progression, whose sums over even ranges end in many zero bits.
__device__ __forceinline__ unsigned int weight(unsigned int index) {
    unsigned int mixed = (index + 1) * 0x9E3779B1u;
    return mixed ^ (mixed >> 16);
}

__device__ __forceinline__ unsigned long long weighted(unsigned int word, unsigned int index) {
    return static_cast<unsigned long long>(word) * weight(index);
}

// Returns what 16 bytes at `position` of a slot, a multiple of 16, add to the checksum.
__device__ __forceinline__ unsigned long long weighted_at(unsigned int position, uint4 words) {
    unsigned int index = position / 4;
    return weighted(words.x, index) + weighted(words.y, index + 1) + weighted(words.z, index + 2) +
           weighted(words.w, index + 3);
}

// Returns what one byte adds: its share of the little-endian word that contains it.
__device__ __forceinline__ unsigned long long weighted_at(unsigned int position,
                                                          unsigned char byte) {
    return weighted(static_cast<unsigned int>(byte) << (position % 4 * 8), position / 4);
}

// Copies `count` units with one warp. Returns this lane's part of the checksum, 0 if not `summed`.
//
// Each unit is read only once, so the load need not keep it in a cache. The store keeps it in the L2
// cache, where the copy engine finds staging, and the model its blocks. It leaves L1 to the model.
template <typename Unit, unsigned int IN_FLIGHT>
__device__ __forceinline__ unsigned long long copy_units(unsigned long long source,
                                                         unsigned long long target,
                                                         unsigned int count, unsigned int position,
                                                         bool summed) {
    unsigned long long sum = 0;
    for (unsigned int first = threadIdx.x % LANES; first < count; first += IN_FLIGHT * LANES) {
        const Unit* from = reinterpret_cast<const Unit*>(source) + first;
        Unit* to = reinterpret_cast<Unit*>(target) + first;
        const unsigned int left = count - first;
        Unit units[IN_FLIGHT];
#pragma unroll
        for (unsigned int k = 0; k < IN_FLIGHT; ++k) {
            if (k * LANES < left) units[k] = __ldcs(from + k * LANES);
        }
#pragma unroll
        for (unsigned int k = 0; k < IN_FLIGHT; ++k) {
            if (k * LANES < left) {
                __stcg(to + k * LANES, units[k]);
                unsigned int at = position + (first + k * LANES) * sizeof(Unit);
                if (summed) sum += weighted_at(at, units[k]);
            }
        }
    }
    return sum;
}

// Copies 16 bytes at a time if both sides are aligned to it, and the rest byte by byte. With an
// aligned slot the condition on `position` follows from the other two. With an unaligned slot,
// words of the checksum would not be words of memory.
__device__ __forceinline__ unsigned long long copy_chunk(unsigned long long source,
                                                         unsigned long long target,
                                                         unsigned int num_bytes,
                                                         unsigned int position, bool summed) {
    bool aligned = ((source | target | position) & 15) == 0;
    unsigned int num_wide = aligned ? num_bytes / 16 : 0;
    unsigned int done = num_wide * 16;
    return copy_units<uint4, WIDE_IN_FLIGHT>(source, target, num_wide, position, summed) +
           copy_units<unsigned char, 1>(source + done, target + done, num_bytes - done,
                                        position + done, summed);
}

// Returns the sum over a warp's lanes to lane 0.
__device__ __forceinline__ unsigned long long sum_of_lanes(unsigned long long sum) {
#pragma unroll
    for (unsigned int distance = LANES / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(ALL_LANES, sum, distance);
    }
    return sum;
}

__device__ __forceinline__ void copy_blocks(bool is_gather, const Chunk* __restrict__ chunks,
                                            unsigned int num_chunks, const Ids& ids,
                                            unsigned int num_blocks, unsigned long long staging,
                                            unsigned long long staging_stride,
                                            unsigned long long* __restrict__ checksums) {
    // A turn has the number i * num_chunks + chunk, and a warp's turns are num_warps apart. There
    // are fewer than 2**31 turns in a launch, and fewer warps, so no sum of two wraps.
    const unsigned int num_turns = num_blocks * num_chunks;
    const unsigned int num_warps = gridDim.x * (blockDim.x / LANES);
    unsigned int turn = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    for (; turn < num_turns; turn += num_warps) {
        const unsigned int i = turn / num_chunks;
        const Chunk chunk = chunks[turn - i * num_chunks];
        const unsigned long long id = ids.of[i];
        const unsigned long long in_block = chunk.base + id * chunk.stride;
        const unsigned long long in_slot = staging + i * staging_stride + chunk.offset;
        unsigned long long sum =
            copy_chunk(is_gather ? in_block : in_slot, is_gather ? in_slot : in_block,
                       chunk.num_bytes, chunk.offset, checksums != nullptr);
        if (checksums != nullptr) {
            sum = sum_of_lanes(sum);
            if (threadIdx.x % LANES == 0) atomicAdd(checksums + i, sum);
        }
    }
}

// Copies block ids.of[i] of the cache to slot i of staging, for every i < num_blocks. Unless
// `checksums` is null, adds the checksum of the slot's bytes to checksums[i]: the sum modulo 2**64
// of each byte p of the slot, shifted left by 8 * (p % 4), times weight(p / 4). A change of one word
// always changes the checksum, and so does a swap of two words. In both cases it changes by a
// product of two numbers that are not 0 and fit into 32 bits.
//
// Every number has 64 bits, because the host passes its integers so. num_blocks is at most
// MAX_BLOCKS, and num_blocks * num_chunks is below 2**31.
extern "C" __global__ void gather(const Chunk* chunks, unsigned long long num_chunks,
                                  const __grid_constant__ Ids ids, unsigned long long num_blocks,
                                  unsigned char* staging, unsigned long long staging_stride,
                                  unsigned long long* checksums) {
    copy_blocks(true, chunks, static_cast<unsigned int>(num_chunks), ids,
                static_cast<unsigned int>(num_blocks),
                reinterpret_cast<unsigned long long>(staging), staging_stride, checksums);
}

// Copies slot i of staging to block ids.of[i] of the cache, likewise. No id may occur twice.
extern "C" __global__ void scatter(const Chunk* chunks, unsigned long long num_chunks,
                                   const __grid_constant__ Ids ids, unsigned long long num_blocks,
                                   unsigned char* staging, unsigned long long staging_stride,
                                   unsigned long long* checksums) {
    copy_blocks(false, chunks, static_cast<unsigned int>(num_chunks), ids,
                static_cast<unsigned int>(num_blocks),
                reinterpret_cast<unsigned long long>(staging), staging_stride, checksums);
}
