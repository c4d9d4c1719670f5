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

constexpr unsigned int LANES = 32;
constexpr unsigned int ALL_LANES = 0xffffffffu;
// Loads that a lane issues before its first store. Device memory answers in some 0.7 us, and the
// rate is the bytes in flight (2 KiB per warp) divided by that time.
constexpr unsigned int IN_FLIGHT = 4;

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
template <typename Unit>
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
            // Each unit is read only once, so it need not stay in a cache.
            if (k * LANES < left) units[k] = __ldcs(from + k * LANES);
        }
#pragma unroll
        for (unsigned int k = 0; k < IN_FLIGHT; ++k) {
            if (k * LANES < left) {
                __stcs(to + k * LANES, units[k]);
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
    return copy_units<uint4>(source, target, num_wide, position, summed) +
           copy_units<unsigned char>(source + done, target + done, num_bytes - done,
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
                                            unsigned int num_chunks,
                                            const int* __restrict__ block_ids,
                                            unsigned int num_blocks, unsigned long long staging,
                                            unsigned long long staging_stride,
                                            unsigned long long* __restrict__ checksums) {
    // A turn has the number i * num_chunks + chunk, and a warp's turns are num_warps apart. The
    // number may exceed 32 bits. So it is kept as the pair (i, chunk), which also saves a division
    // per turn. There are fewer than 2**31 warps, blocks and chunks, so no sum of two wraps.
    const unsigned int lane = threadIdx.x % LANES;
    const unsigned int num_warps = gridDim.x * (blockDim.x / LANES);
    const unsigned int warp = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    const unsigned int i_step = num_warps / num_chunks;
    const unsigned int chunk_step = num_warps % num_chunks;
    unsigned int i = warp / num_chunks;
    unsigned int chunk_index = warp % num_chunks;
    // The ids may be in host memory, microseconds away. So lane k keeps block_ids[kept_from + k].
    unsigned int kept_from = i;
    int kept_id = 0;
    for (bool is_first = true; i < num_blocks; is_first = false) {
        if (is_first || i - kept_from >= LANES) {
            kept_from = i;
            if (lane < num_blocks - i) kept_id = __ldg(block_ids + i + lane);
        }
        const unsigned long long id = __shfl_sync(ALL_LANES, kept_id, i - kept_from);
        const Chunk chunk = chunks[chunk_index];
        const unsigned long long in_block = chunk.base + id * chunk.stride;
        const unsigned long long in_slot = staging + i * staging_stride + chunk.offset;
        unsigned long long sum =
            copy_chunk(is_gather ? in_block : in_slot, is_gather ? in_slot : in_block,
                       chunk.num_bytes, chunk.offset, checksums != nullptr);
        if (checksums != nullptr) {
            sum = sum_of_lanes(sum);
            if (lane == 0) atomicAdd(checksums + i, sum);
        }
        i += i_step;
        chunk_index += chunk_step;
        if (chunk_index >= num_chunks) {
            chunk_index -= num_chunks;
            ++i;
        }
    }
}

// Copies block block_ids[i] of the cache to slot i of staging, for every i < num_blocks. Unless
// `checksums` is null, adds the checksum of the slot's bytes to checksums[i]: the sum modulo 2**64
// of each byte p of the slot, shifted left by 8 * (p % 4), times weight(p / 4). A change of one word
// always changes the checksum, and so does a swap of two words. In both cases it changes by a
// product of two numbers that are not 0 and fit into 32 bits.
extern "C" __global__ void gather(const Chunk* chunks, unsigned int num_chunks,
                                  const int* block_ids, unsigned int num_blocks,
                                  unsigned char* staging, unsigned long long staging_stride,
                                  unsigned long long* checksums) {
    copy_blocks(true, chunks, num_chunks, block_ids, num_blocks,
                reinterpret_cast<unsigned long long>(staging), staging_stride, checksums);
}

// Copies slot i of staging to block block_ids[i] of the cache, likewise. No id may occur twice.
extern "C" __global__ void scatter(const Chunk* chunks, unsigned int num_chunks,
                                   const int* block_ids, unsigned int num_blocks,
                                   unsigned char* staging, unsigned long long staging_stride,
                                   unsigned long long* checksums) {
    copy_blocks(false, chunks, num_chunks, block_ids, num_blocks,
                reinterpret_cast<unsigned long long>(staging), staging_stride, checksums);
}
