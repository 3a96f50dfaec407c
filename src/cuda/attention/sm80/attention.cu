// verify_attn on any GPU since sm_80, for more than 16 rows a request: mma.sync and cp.async.
// README.md explains the schedule; few_rows.cu is the kernel for up to 16 rows.
//
// A block takes one tile of 64 rows of a request and one split of its keys, 32 keys at a time, with
// two groups of four warps that have 32 rows each and share nothing but the keys. For each 32 keys
// a group does:
//   scores   each warp multiplies the rows with its quarter of the 576 features, held in registers
//            since the start; the quarters meet in shared memory
//   softmax  warp h adds them up for rows 8h..8h+7, updates the running maximum and sum, and leaves
//            the probabilities in shared memory as the next product's operand
//   values   each warp multiplies the probabilities with its own 128 of the 512 columns
// while the next 32 keys arrive in the other of two slots.
//
// Per row and key 1,088 multiply-adds, per key 1,152 bytes: 64 rows do 121 FLOP a byte, so the
// matrix units bound it (627 TF on the H200 for mma.sync).
#include <cfloat>

#include "cuda/attention/sm80/common.h"

namespace kdtree::cuda::sm80 {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * 32;
constexpr int kGroups = kThreads / kGroupThreads;
constexpr int kTiles = 2;  // of 16 rows, in a group
constexpr int kGroupRows = 16 * kTiles;
constexpr int kRows = kGroups * kGroupRows;
constexpr int kBands = 2 * kTiles;  // of 8 rows; warp h of a group owns its band h
static_assert(kBands == kGroupWarps && kFeatureGroups == kGroupWarps);
// Of a key in shared memory. 16 bytes more than it has: 8 keys' chunks of 16 bytes lie in 8
// different bank groups.
constexpr int kRowBytes = kDim * 2 + 16;
constexpr int kColumns = kLatent / kGroupWarps;  // of the output, a warp

struct Shared {
  alignas(128) unsigned char slots[2][kKeys][kRowBytes];
  union {
    // Partial scores of a band, of each warp but its owner, by 8-key tile and lane: two keys, as
    // the product leaves them. The owner puts its probabilities over them: 8x8 matrices, operands
    // of the second product.
    float2 scores[kGroups][kBands][kGroupWarps - 1][kKeys / 8][32];
    float sums[2][kRows];  // at the end, of the probabilities: exact, and as rounded to T
  };
  // Kept here rather than in registers, of which the products leave few.
  Block block;
  float scale;                    // of scores, for exponentials in base 2
  uint64_t nodes[kRows];          // that a row sees
  uint64_t tile_nodes;            // that any row of the tile sees
  int64_t entries[kKeys];         // of the page table
  const char *sources[2][kKeys];  // of a step's keys; nullptr: not to be read
  float top[kRows];               // maximum of the scores in use
  float factor[kRows];            // for what the output holds so far, where a band is rescaled
  alignas(4) uint8_t rescaled[kGroups][kBands];
};
static_assert(sizeof(Shared) <= 101376);

// Where a thread stands; computed again where it is needed.
struct Place {
  int group, warp, lane;  // warp: within the group
  __device__ explicit Place(unsigned thread)
      : group(thread / kGroupThreads), warp(thread % kGroupThreads / 32), lane(thread % 32) {}
  __device__ int row(int band) const { return group * kGroupRows + band * 8 + lane / 4; }
};

// Brings the keys of a step to shared memory. The first warp finds where they lie, a lane a key,
// and asks for the table entries of the step after; group 1 copies, eight threads a key. Keys that
// may not be read become zeros.
template <class T, bool Fp8>
struct KeyLoader {
  static constexpr int chunk_bytes = Fp8 ? 8 : 16;  // eight features

  const Params &a;
  Shared &shared;
  int step;

  __device__ int position(int lane) const { return shared.block.keys.begin + step * kKeys + lane; }

  __device__ void load_entry(int lane) const {
    copy_entry(a, shared.block, shared.tile_nodes, position(lane), &shared.entries[lane]);
  }

  // Once this lane's entry is there.
  __device__ void find(int lane) const {
    shared.sources[step % 2][lane] = find_key<Fp8>(a, position(lane), &shared.entries[lane]);
    KeyLoader{a, shared, step + 1}.load_entry(lane);
  }

  __device__ void load(int thread) const {
#pragma unroll
    for (int key = thread / 8; key < kKeys; key += kGroupThreads / 8) {
      const char *from = shared.sources[step % 2][key];
      const bool valid = from != nullptr;
      if (!valid) from = static_cast<const char *>(a.p.kv_cache);
      from += thread % 8 * chunk_bytes;
      const uint32_t to = shared_address(shared.slots[step % 2][key]) + thread % 8 * 16;
#pragma unroll
      for (int i = 0; i < kDim / 64; ++i)
        copy_async<chunk_bytes>(to + i * 128, from + i * 8 * chunk_bytes, valid);
    }
  }

  // e4m3 chunks arrive in the first half of their place and are widened there, by the thread that
  // copied them.
  __device__ void widen(int thread) const {
#pragma unroll
    for (int key = thread / 8; key < kKeys; key += kGroupThreads / 8) {
      unsigned char *chunk = shared.slots[step % 2][key] + thread % 8 * 16;
#pragma unroll
      for (int i = 0; i < kDim / 64; ++i) {
        const uint2 eight = *reinterpret_cast<const uint2 *>(chunk + i * 128);
        *reinterpret_cast<uint4 *>(chunk + i * 128) = attention::widen<T>(eight);
      }
    }
  }
};

// Everything at its start; by the first warp.
__device__ void set_up(const Params &a, const Block &block, Shared &shared) {
  const int lane = threadIdx.x;
  const uint64_t all = read_nodes(a, block, kRows, shared.nodes);
  for (int i = lane; i < kRows; i += 32) shared.top[i] = -FLT_MAX;
  if (lane < kGroups * kBands) shared.rescaled[lane / kBands][lane % kBands] = 0;
  if (lane > 0) return;
  shared.tile_nodes = all;
  shared.block = block;
  shared.scale = score_scale(a);
}

// This warp's part of the scores of the group's rows, 16 keys at a time: to the bands' owners, and
// of its own band to own[n] for keys 8n + 2t and + 1 of the step. Bands are counted from the warp's
// own: i stands for band i ^ warp. As matrices: 8 keys by 8 features, two by two.
template <class T>
__device__ __forceinline__ void score_keys(Shared &shared, int step, Place at,
                                           const uint32_t (&q)[kFeatureSteps][kTiles][4],
                                           float (&own)[kKeys / 8][2]) {
  const uint32_t address = shared_address(shared.slots[step % 2][at.lane % 8 + at.lane / 16 * 8]) +
                           at.warp * 32 + at.lane / 8 % 2 * 16;
#pragma unroll
  for (int first = 0; first < kKeys / 8; first += 2) {
    float score[2][kTiles][4] = {};
#pragma unroll
    for (int j = 0; j < kFeatureSteps; ++j) {
      uint32_t k[4];
      load_matrices(k, address + first * 8 * kRowBytes + j * 128);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply<T>(score[0][m], q[j][m], k[0], k[1]);
        multiply<T>(score[1][m], q[j][m], k[2], k[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      own[first + n][0] = score[n][0][0], own[first + n][1] = score[n][0][1];
#pragma unroll
      for (int i = 1; i < kBands; ++i) {
        const float *part = score[n][i / 2] + i % 2 * 2;
        shared.scores[at.group][i ^ at.warp][i - 1][first + n][at.lane] = {part[0], part[1]};
      }
    }
  }
}

// A lane's share of its row's sums of probabilities, exact and as rounded to T. Lane 4g + t has row
// g of its warp's band.
struct Sums {
  float exact = 0, rounded = 0;
};

// Scores of band `warp` to probabilities: x[n][i] is that of key 8n + 2t + i of the step.
template <class T>
__device__ __forceinline__ void softmax(Shared &shared, int step, Place at,
                                        const float (&own)[kKeys / 8][2], Sums &sums) {
  const int row = at.row(at.warp);
  float x[kKeys / 8][2];
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    x[n][0] = own[n][0], x[n][1] = own[n][1];
#pragma unroll
    for (int part = 0; part < kGroupWarps - 1; ++part) {
      const float2 v = shared.scores[at.group][at.warp][part][n][at.lane];
      x[n][0] += v.x, x[n][1] += v.y;
    }
    x[n][0] *= shared.scale, x[n][1] *= shared.scale;
  }
  const int offset = shared.block.keys.begin + step * kKeys - shared.block.request.prefix;
  if (offset + kKeys > 1) {
    const uint32_t seen = attention::sees32(shared.nodes[row], offset) >> at.lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      if (!(seen >> n * 8 & 1)) x[n][0] = -INFINITY;
      if (!(seen >> n * 8 & 2)) x[n][1] = -INFINITY;
    }
  }
  float most = fmaxf(x[0][0], x[0][1]);
#pragma unroll
  for (int n = 1; n < kKeys / 8; ++n) most = fmaxf(most, fmaxf(x[n][0], x[n][1]));
  float top = shared.top[row];
  const bool rescaled = __any_sync(~0u, most > top + kSlack);
  if (rescaled) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if (!(most > top + kSlack)) most = top;
    const float factor = attention::exp2(top - most);
    top = most;
    sums.exact *= factor, sums.rounded *= factor;
    __syncwarp();  // the old maximum is read
    if (at.lane % 4 == 0) shared.top[row] = top, shared.factor[row] = factor;
  }
  if (at.lane == 0) shared.rescaled[at.group][at.warp] = rescaled;
  __syncwarp();  // the partial scores are read
  uint32_t *probabilities =
      reinterpret_cast<uint32_t *>(shared.scores[at.group][at.warp]) + at.lane;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const float low = attention::exp2(x[n][0] - top);
    const float high = attention::exp2(x[n][1] - top);
    const uint32_t pair = pack<T>(low, high);
    const float2 rounded = unpack<T>(pair);
    sums.exact += low + high;
    sums.rounded += rounded.x + rounded.y;
    probabilities[n * 32] = pair;
  }
}

// out += probabilities x values for this warp's columns, 16 keys at a time. As matrices: 8 keys by
// 8 columns, two by two.
template <class T>
__device__ __forceinline__ void add_values(Shared &shared, int step, Place at,
                                           float (&out)[kTiles][kColumns / 8][4]) {
  const uint32_t rescaled = *reinterpret_cast<const uint32_t *>(shared.rescaled[at.group]);
  if (rescaled != 0) {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      if ((rescaled >> band * 8 & 0xff) == 0) continue;
      const float factor = shared.factor[at.row(band)];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        out[band / 2][n][band % 2 * 2] *= factor;
        out[band / 2][n][band % 2 * 2 + 1] *= factor;
      }
    }
  }
  // Of a 16-row tile: rows 0..7 and 8..15 for the first 8 keys, then for the others.
  const uint32_t probabilities = shared_address(shared.scores[at.group][at.lane / 8 % 2]) +
                                 at.lane / 16 * 128 + at.lane % 8 * 16;
  const uint32_t address = shared_address(shared.slots[step % 2][at.lane % 16]) +
                           at.warp * (kColumns * 2) + at.lane / 16 * 16;
#pragma unroll
  for (int half = 0; half < kKeys / 16; ++half) {
    uint32_t p[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
      load_matrices(p[m], probabilities + m * 2 * sizeof(shared.scores[0][0]) + half * 256);
#pragma unroll
    for (int n = 0; n < kColumns / 8; n += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, address + half * 16 * kRowBytes + n * 16);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply<T>(out[m][n], p[m], v[0], v[1]);
        multiply<T>(out[m][n + 1], p[m], v[2], v[3]);
      }
    }
  }
}

// Leaves the rows' sums in shared memory.
__device__ __forceinline__ void share_sums(Shared &shared, Place at, Sums sums) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sums.exact += __shfl_xor_sync(~0u, sums.exact, step);
    sums.rounded += __shfl_xor_sync(~0u, sums.rounded, step);
  }
  if (at.lane % 4 != 0) return;
  const int row = at.row(at.warp);
  shared.sums[0][row] = sums.exact;
  shared.sums[1][row] = sums.rounded;
}

template <class T, bool Fp8>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Params a) {
  using Loader = KeyLoader<T, Fp8>;
  extern __shared__ __align__(128) unsigned char attention_smem[];
  Shared &shared = *reinterpret_cast<Shared *>(attention_smem);

  const Block block = read_block(a, kRows);
  if (block.steps == 0) return write_nothing<T>(a, block);
  unsigned thread = threadIdx.x;
  if (thread < 32) set_up(a, block, shared);
  __syncthreads();
  if (thread < 32) {
    Loader{a, shared, 0}.load_entry(thread);
    wait_copies();
    Loader{a, shared, 0}.find(thread);
  }
  __syncthreads();
  if (Place(thread).group == 1) Loader{a, shared, 0}.load(thread % kGroupThreads);
  uint32_t q[kFeatureSteps][kTiles][4];
  load_q<T, kTiles>(a, block, Place(thread).group * kGroupRows, Place(thread).warp,
                    Place(thread).warp, q);

  float out[kTiles][kColumns / 8][4] = {};
  Sums sums;
  for (int step = 0; step < shared.block.steps; ++step) {
    forget(thread);
    wait_copies();
    if (Fp8 && Place(thread).group == 1) Loader{a, shared, step}.widen(thread % kGroupThreads);
    if (thread < 32) Loader{a, shared, step + 1}.find(thread);
    __syncthreads();  // this step's keys are there; the other slot and the scores are free
    forget(thread);
    if (Place(thread).group == 1) {
      if (step + 1 < shared.block.steps) Loader{a, shared, step + 1}.load(thread % kGroupThreads);
      if (shared.block.rows <= kGroupRows) continue;  // it has no rows
    }
    float own[kKeys / 8][2];
    score_keys<T>(shared, step, Place(thread), q, own);
    sync(1 + Place(thread).group, kGroupThreads);
    forget(thread);
    softmax<T>(shared, step, Place(thread), own, sums);
    sync(1 + Place(thread).group, kGroupThreads);
    forget(thread);
    add_values<T>(shared, step, Place(thread), out);
  }
  __syncthreads();
  forget(thread);
  share_sums(shared, Place(thread), sums);
  __syncthreads();
  if (thread < shared.block.rows)
    write_lse(a, shared.block, thread, shared.top[thread], shared.sums[0][thread]);
  const int first = Place(thread).group * kGroupRows;
  write_output<T, kTiles, kColumns>(a, shared.block, first, Place(thread).warp * kColumns,
                                    shared.sums[1] + first, out);
}

template <class T, bool Fp8>
void launch_tiles(const Params &a, Stream stream) {
  allow_smem(attention_kernel<T, Fp8>, sizeof(Shared));
  launch("verify_attn", attention_kernel<T, Fp8>, dim3(a.p.batch * a.splits * a.tiles),
         dim3(kThreads), sizeof(Shared), stream, a);
}

template <class T>
void choose_keys(const Params &a, Stream stream) {
  a.p.kv_dtype == KDTREE_F8E4M3 ? launch_tiles<T, true>(a, stream)
                                : launch_tiles<T, false>(a, stream);
}

void attention(const Params &a, Stream stream) {
  if (tile_rows(a.rows) < kRows) return few_rows_attention(a, stream);
  a.p.q_dtype == KDTREE_BF16 ? choose_keys<__nv_bfloat16>(a, stream)
                             : choose_keys<__half>(a, stream);
}

}  // namespace kdtree::cuda::sm80
