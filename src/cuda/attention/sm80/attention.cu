// verify_attn on any GPU since sm_80, for more than 16 rows a request: mma.sync and cp.async.
// README.md explains the schedule; few_rows.cu is the kernel for up to 16 rows.
//
// A block takes one tile of 64 rows of a request and a piece of its keys, 16 keys a step, with 8
// warps in two groups. In a step
//   scores   each group multiplies its 32 rows with the step's keys: a warp a quarter of the 576
//            features, held in registers since the start; the quarters meet in shared memory
//   softmax  warp h of a group adds them up for rows 8h..8h+7, updates the maximum in use and the
//            sums, and leaves the probabilities in shared memory as the next product's operand
//   values   each warp multiplies all rows' probabilities of the step before with its own 64 of the
//            512 columns
// so that the softmax of a step goes on between the products of the step before. The keys of the
// next two steps are on their way to the other two of four slots.
//
// Per row and key 1,088 multiply-adds, per key 1,152 bytes: 64 rows do 121 FLOP a byte, so the
// matrix units bound it (627 TF on the H200 for mma.sync).
#include <cfloat>

#include "cuda/attention/sm80/common.h"

namespace kdtree::cuda::sm80 {

constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * 32;
constexpr int kGroups = kThreads / kGroupThreads;
constexpr int kGroupTiles = 2;  // of 16 rows, in a group
constexpr int kGroupRows = 16 * kGroupTiles;
constexpr int kRows = kGroups * kGroupRows;
constexpr int kBands = 2 * kGroupTiles;  // of 8 rows; warp h of a group owns its band h
static_assert(kBands == kGroupWarps && kFeatureGroups == kGroupWarps);
constexpr int kStepKeys = 16;
constexpr int kSlots = 4;  // for the keys of a step each
constexpr int kLapKeys = kSlots * kStepKeys;
// Of a key in shared memory, 9 lines of 128 bytes. Key r has its 16-byte chunk c of a line at
// c ^ (r % 8): the 8 keys of one chunk are in 8 different bank groups.
constexpr int kRowBytes = kDim * 2;
constexpr int kColumns = kLatent / kWarps;  // of the output, a warp

struct Shared {
  alignas(128) unsigned char slots[kSlots][kStepKeys][kRowBytes];
  // Partial scores of a band, of each warp but its owner, by lane: two keys of each 8-key tile, as
  // the product leaves them.
  float4 scores[kGroups][kBands][kGroupWarps - 1][32];
  // Of even and odd steps: 8x8 matrices, operands of the second product.
  uint32_t probabilities[2][kGroups * kBands][kStepKeys / 8][32];
  // Kept here rather than in registers, of which the products leave few.
  Block block;
  Lookup lookup;
  float scale;                    // of scores, for exponentials in base 2
  uint64_t nodes[kRows];          // that a row sees
  uint64_t tile_nodes;            // that any row of the tile sees
  int64_t entries[kLapKeys];      // of the page table, for the next lap
  const char *sources[kLapKeys];  // of the keys to be copied next; nullptr: not to be read
  float top[kRows];               // maximum of the scores in use
  // Of even and odd steps: for what the output holds so far, and the bands where it counts.
  float factor[2][kRows];
  alignas(8) uint8_t rescaled[2][kGroups * kBands];
  float sums[2][kRows];  // at the end, of the probabilities: exact, and as rounded to T
};
static_assert(sizeof(Shared) <= 101376);

// Where a thread stands; computed again where it is needed.
struct Place {
  int group, warp, lane;  // warp: within the group
  __device__ explicit Place(unsigned thread)
      : group(thread / kGroupThreads), warp(thread % kGroupThreads / 32), lane(thread % 32) {}
  __device__ int band() const { return group * kBands + warp; }
  __device__ int row() const { return band() * 8 + lane / 4; }  // of the own band
};

// Finds where the keys of two steps lie, by one warp, a lane a key: `half` of a lap, from key
// `first` of the split on. Their table entries are there; those of a lap later are asked for.
template <bool Fp8>
__device__ __forceinline__ void find_keys(const Params &a, Shared &shared, int half, int first) {
  const int i = half * 32 + threadIdx.x % 32;
  const Lookup lookup = shared.lookup;
  const int position = lookup.begin + first + threadIdx.x % 32;
  shared.sources[i] = find_key<Fp8>(a, position, &shared.entries[i]);
  lookup.copy(a, shared.block, shared.tile_nodes, position + kLapKeys, &shared.entries[i]);
}

// A thread's share of the keys of a slot. Eight threads of each group bring a key, 16 features of
// every 128 bytes: group 0 the first five of nine times, group 1 the others. Keys that may not be
// read become zeros.
template <class T, bool Fp8>
struct Share {
  static constexpr int chunk_bytes = Fp8 ? 8 : 16;  // eight features
  static constexpr int kMost = 5;

  int key, group, chunk;
  unsigned char *place;

  __device__ __forceinline__ Share(Shared &shared, int slot, unsigned thread)
      : key(thread % kGroupThreads / 8), group(thread / kGroupThreads), chunk(thread % 8) {
    place = shared.slots[slot][key] + (chunk ^ key % 8) * 16 + group * kMost * 128;
  }
  __device__ __forceinline__ bool has(int i) const { return i < kMost - 1 || group == 0; }

  // From shared.sources; `source`: the key's place there.
  __device__ __forceinline__ void copy(const Params &a, const char *source, bool wanted) const {
    const bool valid = source != nullptr;
    if (!valid) source = static_cast<const char *>(a.p.kv_cache);
    source += (chunk + group * kMost * 8) * chunk_bytes;
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      copy_async_if<chunk_bytes>(wanted & has(i), shared_address(place) + i * 128,
                                 source + i * 8 * chunk_bytes, valid);
  }

  // e4m3 chunks arrive in the first half of their place and are widened there, by the thread that
  // copied them.
  __device__ __forceinline__ void widen() const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (!has(i)) break;
      const uint2 eight = *reinterpret_cast<const uint2 *>(place + i * 128);
      *reinterpret_cast<uint4 *>(place + i * 128) = attention::widen<T>(eight);
    }
  }
};

// Everything at its start.
__device__ __forceinline__ void set_up(const Params &a, const Block &block, Shared &shared) {
  // Before the first step there is one that adds nothing.
  for (int i = threadIdx.x; i < kStepKeys * kRowBytes / 16; i += kThreads)
    reinterpret_cast<uint4 *>(shared.slots[kSlots - 1])[i] = {};
  for (int i = threadIdx.x; i < kRows * kStepKeys / 2; i += kThreads)
    (&shared.probabilities[1][0][0][0])[i] = 0;
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  const uint64_t all = read_nodes(a, block, kRows, shared.nodes);
  for (int i = lane; i < kRows; i += 32) shared.top[i] = -FLT_MAX;
  if (lane < 2 * kGroups * kBands) shared.rescaled[lane / 8][lane % 8] = 0;
  if (lane > 0) return;
  shared.tile_nodes = all;
  shared.block = block;
  shared.scale = score_scale(a);
  shared.lookup = Lookup::of(a, block);
}

// This warp's part of the scores of the group's rows, 16 features at a time. As matrices: 8 keys by
// 8 features, two by two. Calls meanwhile(j) between the products.
template <class T, class Meanwhile>
__device__ __forceinline__ void multiply_keys(uint32_t (&k)[3][4], uint32_t address,
                                              const uint32_t (&q)[kFeatureSteps][kGroupTiles][4],
                                              float (&score)[2][kGroupTiles][4],
                                              const Meanwhile &meanwhile) {
#pragma unroll
  for (int j = 0; j < kFeatureSteps; ++j) {
    if (j + 2 < kFeatureSteps) load_matrices(k[(j + 2) % 3], address + (j + 2) * 128);
    meanwhile(j);
#pragma unroll
    for (int m = 0; m < kGroupTiles; ++m) {
      multiply<T>(score[0][m], q[j][m], k[j % 3][0], k[j % 3][1]);
      multiply<T>(score[1][m], q[j][m], k[j % 3][2], k[j % 3][3]);
    }
  }
}

// Hands the parts of the other bands to their owners. Bands are counted from the warp's own: i
// stands for band i ^ warp.
__device__ __forceinline__ void store_parts(Shared &shared, Place at,
                                            const float (&score)[2][kGroupTiles][4]) {
#pragma unroll
  for (int i = 1; i < kBands; ++i) {
    const float *low = score[0][i / 2] + i % 2 * 2, *high = score[1][i / 2] + i % 2 * 2;
    shared.scores[at.group][i ^ at.warp][i - 1][at.lane] = {low[0], low[1], high[0], high[1]};
  }
}

// The whole scores of the warp's band: x[n][i] is that of key 8n + 2t + i of the step.
__device__ __forceinline__ void add_parts(const Shared &shared, Place at,
                                          const float (&own)[2][kGroupTiles][4],
                                          float (&x)[kStepKeys / 8][2]) {
  x[0][0] = own[0][0][0], x[0][1] = own[0][0][1];
  x[1][0] = own[1][0][0], x[1][1] = own[1][0][1];
#pragma unroll
  for (int part = 0; part < kGroupWarps - 1; ++part) {
    const float4 v = shared.scores[at.group][at.warp][part][at.lane];
    x[0][0] += v.x, x[0][1] += v.y;
    x[1][0] += v.z, x[1][1] += v.w;
  }
}

// A lane's share of a row of its warp's band, 4g + t of row g: sums of probabilities, exact and as
// rounded to T.
struct Sums {
  float exact = 0, rounded = 0;
};

__device__ __forceinline__ float largest(const float (&x)[kStepKeys / 8][2]) {
  return fmaxf(fmaxf(x[0][0], x[0][1]), fmaxf(x[1][0], x[1][1]));
}

// Masks what must be masked, and raises the maximum in use where it must be; returns it.
__device__ __forceinline__ float update_top(Shared &shared, int step, Place at,
                                            float (&x)[kStepKeys / 8][2], Sums &sums) {
  const int offset = shared.block.keys.begin + step * kStepKeys - shared.block.request.prefix;
  const bool masked = offset + kStepKeys > 1;
  float top = shared.top[at.row()];
  bool rescaled = false;
  if (__any_sync(~0u, masked | (largest(x) > top + kSlack))) {
    if (masked) {
      const uint32_t seen = attention::sees32(shared.nodes[at.row()], offset) >> at.lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kStepKeys / 8; ++n) {
        if (!(seen >> n * 8 & 1)) x[n][0] = -INFINITY;
        if (!(seen >> n * 8 & 2)) x[n][1] = -INFINITY;
      }
    }
    float most = largest(x);
    rescaled = __any_sync(~0u, most > top + kSlack);
    if (rescaled) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (!(most > top + kSlack)) most = top;
      const float factor = attention::exp2(top - most);
      top = most;
      sums.exact *= factor, sums.rounded *= factor;
      __syncwarp();  // the old maximum is read
      if (at.lane % 4 == 0) {
        shared.top[at.row()] = top;
        shared.factor[step % 2][at.row()] = factor;
      }
    }
  }
  if (at.lane == 0) shared.rescaled[step % 2][at.band()] = rescaled;
  return top;
}

template <class T>
__device__ __forceinline__ void exponentials(Shared &shared, int step, Place at,
                                             const float (&x)[kStepKeys / 8][2], float top,
                                             Sums &sums) {
#pragma unroll
  for (int n = 0; n < kStepKeys / 8; ++n) {
    const float low = attention::exp2(x[n][0] - top);
    const float high = attention::exp2(x[n][1] - top);
    const uint32_t pair = pack<T>(low, high);
    const float2 rounded = unpack<T>(pair);
    sums.exact += low + high;
    sums.rounded += rounded.x + rounded.y;
    shared.probabilities[step % 2][at.band()][n][at.lane] = pair;
  }
}

// out += probabilities x values of a step for this warp's columns, 16 at a time: load(c), add(c).
// As matrices: 8 keys by 8 columns, two by two.
template <class T, int Tiles>
struct Values {
  float (&out)[Tiles][kColumns / 8][4];
  uint32_t p[Tiles][4];
  uint32_t v[2][4];  // of columns 16 c at v[c % 2]
  uint32_t address, probabilities;

  // `rescaled`: shared.rescaled of the step.
  __device__ __forceinline__ void rescale(const Shared &shared, int step, Place at,
                                          uint64_t rescaled) {
    if (rescaled == 0) return;
#pragma unroll
    for (int band = 0; band < 2 * Tiles; ++band) {
      if ((rescaled >> band * 8 & 0xff) == 0) continue;
      const float factor = shared.factor[step & 1][band * 8 + at.lane / 4];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        out[band / 2][n][band % 2 * 2] *= factor;
        out[band / 2][n][band % 2 * 2 + 1] *= factor;
      }
    }
  }

  __device__ __forceinline__ void start(const Shared &shared, int step, Place at) {
    probabilities = shared_address(shared.probabilities[step & 1][at.lane / 8 % 2][at.lane / 16]) +
                    at.lane % 8 * 16;
    address = shared_address(shared.slots[step & (kSlots - 1)][at.lane % 16]) +
              (at.group * kGroupWarps + at.warp) * (kColumns * 2) +
              (at.lane / 16 ^ at.lane % 8) * 16;
  }
  // Of a 16-row tile: rows 0..7 and 8..15 for the first 8 keys, then for the others.
  __device__ __forceinline__ void load_probabilities(int m) {
    load_matrices(p[m], probabilities + m * 2 * sizeof(Shared::probabilities[0][0]));
  }

  __device__ __forceinline__ void load(int c) {
    load_matrices_transposed(v[c % 2], address ^ (c * 32));
  }

  __device__ __forceinline__ void add(int c) {
#pragma unroll
    for (int m = 0; m < Tiles; ++m) {
      multiply<T>(out[m][2 * c], p[m], v[c % 2][0], v[c % 2][1]);
      multiply<T>(out[m][2 * c + 1], p[m], v[c % 2][2], v[c % 2][3]);
    }
  }
};

__device__ __forceinline__ uint64_t rescaled_bands(const Shared &shared, int step) {
  return *reinterpret_cast<const uint64_t *>(shared.rescaled[step & 1]);
}

// The block's work; Groups: that have rows. In a tile of 32 rows or fewer, group 0 does the scores.
template <class T, bool Fp8, int Groups>
struct Attention {
  static constexpr int kTiles = Groups * kGroupTiles;
  const Params &a;
  Shared &shared;
  unsigned thread;
  uint32_t q[kFeatureSteps][kGroupTiles][4];
  float out[kTiles][kColumns / 8][4] = {};
  Sums sums;

  // One step: its scores and probabilities, and the values of the step before, of which `values`
  // takes the last columns along. The keys of step + 2 are asked for. What has to be waited for
  // stands before products that do not need it.
  __device__ __forceinline__ void take_step(int step, int steps, Values<T, kTiles> &values) {
    forget(thread);
    start_step(step);
    const Place at(thread);
    const bool has_rows = Groups == kGroups || at.group == 0;
    uint32_t k[3][4];
    const uint32_t address =
        shared_address(shared.slots[step % kSlots][at.lane % 8 + at.lane / 16 * 8]) +
        ((at.warp * 2 + at.lane / 8 % 2) ^ at.lane % 8) * 16;
    load_matrices(k[0], address);
    load_matrices(k[1], address + 128);
    const uint64_t rescaled = rescaled_bands(shared, step - 1);
    values.add(3);
    if (step % kSlots + 8 == static_cast<int>(thread / 32 * 2))  // warp 4 or 5, every other step
      find_keys<Fp8>(a, shared, step % kSlots / 2, step * kStepKeys + kLapKeys);
    const auto meanwhile = [&](int j) {
      // A branch, which waits for what is being loaded, and across which the compiler moves no
      // product: it stands where that costs least. With e4m3 there are no registers for that.
      if (j == (Fp8 ? 4 : 8)) values.rescale(shared, step - 1, at, rescaled);
      if (j == 6) values.start(shared, step - 1, at);
      if (j == 7 && kTiles == 4) values.load_probabilities(0), values.load_probabilities(1);
      if (j == 8) values.load_probabilities(kTiles - 2), values.load_probabilities(kTiles - 1);
    };
    float score[2][kGroupTiles][4] = {};
    if (has_rows) {
      multiply_keys<T>(k, address, q, score, meanwhile);
      store_parts(shared, at, score);
    } else {
#pragma unroll
      for (int j = 0; j < kFeatureSteps; ++j) meanwhile(j);
    }
    values.load(0);
    values.load(1);
    values.add(0);
    float x[kStepKeys / 8][2];
    float scale = 0, top = 0;
    if (has_rows) scale = shared.scale;
    sync(1 + at.group, kGroupThreads);  // a group without rows too: racecheck counts by thread
    if (has_rows) add_parts(shared, at, score, x);
    values.add(1);
    values.load(2);
    if (has_rows) {
#pragma unroll
      for (int n = 0; n < kStepKeys / 8; ++n) x[n][0] *= scale, x[n][1] *= scale;
      top = update_top(shared, step, at, x, sums);
    }
    values.load(3);
    if (has_rows) exponentials<T>(shared, step, at, x, top, sums);
    copy_keys(step + 2, step + 2 < steps);
    values.add(2);
  }

  // Waits for the keys of a step and for the probabilities of the one before.
  __device__ __forceinline__ void start_step(int step) {
    wait_copies<1>();
    if (Fp8) Share<T, Fp8>(shared, step % kSlots, thread).widen();
    __syncthreads();
  }

  __device__ __forceinline__ void copy_keys(int step, bool wanted) {
    const Share<T, Fp8> share(shared, step % kSlots, thread);
    share.copy(a, shared.sources[step % kSlots * kStepKeys + share.key], wanted);
    commit_copies();
  }

  __device__ __forceinline__ void run(const Block &block) {
    if (thread / kLapKeys == 2) {  // warps 4 and 5
      const int i = thread % kLapKeys;
      copy_entry(a, block, shared.tile_nodes, block.keys.begin + i, &shared.entries[i]);
      wait_copies<0>();
      find_keys<Fp8>(a, shared, i / 32, i / 32 * 32);
    }
    __syncthreads();
    copy_keys(0, true);
    copy_keys(1, block.steps > 1);
    load_q<T, kGroupTiles>(a, block, Place(thread).group * kGroupRows, Place(thread).warp,
                           Place(thread).warp, q);
    // Before the first step there is one that adds nothing: see set_up.
    Values<T, kTiles> values{out, {}, {}};
    for (int step = 0, steps = shared.block.steps; step < steps; ++step)
      take_step(step, steps, values);
    forget(thread);
    const int last = shared.block.steps - 1;
    wait_copies<0>();
    __syncthreads();
    values.add(3);
    values.rescale(shared, last, Place(thread), rescaled_bands(shared, last));
    values.start(shared, last, Place(thread));
#pragma unroll
    for (int m = 0; m < kTiles; ++m) values.load_probabilities(m);
#pragma unroll
    for (int c = 0; c < kColumns / 16; ++c) {
      values.load(c);
      values.add(c);
    }
    share_sums(Place(thread));
    __syncthreads();
    if (thread < shared.block.rows)
      write_lse(a, shared.block, thread, shared.top[thread], shared.sums[0][thread]);
    write_output<T, kTiles, kColumns>(a, shared.block, 0, thread / 32 * kColumns, shared.sums[1],
                                      out);
  }

  // Leaves the rows' sums in shared memory.
  __device__ __forceinline__ void share_sums(Place at) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      sums.exact += __shfl_xor_sync(~0u, sums.exact, step);
      sums.rounded += __shfl_xor_sync(~0u, sums.rounded, step);
    }
    if (at.lane % 4 != 0) return;
    shared.sums[0][at.row()] = sums.exact;
    shared.sums[1][at.row()] = sums.rounded;
  }
};

template <class T, bool Fp8>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(128) unsigned char attention_smem[];
  Shared &shared = *reinterpret_cast<Shared *>(attention_smem);
  Block block;
  if (!read_block(a, kRows, kStepKeys, block)) return;
  if (block.steps == 0) return write_nothing<T, kThreads>(a, block);
  set_up(a, block, shared);
  __syncthreads();
  if (block.rows > kGroupRows)
    Attention<T, Fp8, 2>{a, shared, threadIdx.x}.run(block);
  else
    Attention<T, Fp8, 1>{a, shared, threadIdx.x}.run(block);
}

template <class T>
void choose_keys(const Params &a, Stream stream) {
  launch_blocks(
      a.p.kv_dtype == KDTREE_F8E4M3 ? attention_kernel<T, true> : attention_kernel<T, false>,
      sizeof(Shared), a, stream);
}

void attention(const Params &a, Stream stream) {
  if (tile_rows(a.rows) < kRows) return few_rows_attention(a, stream);
  a.p.q_dtype == KDTREE_BF16 ? choose_keys<__nv_bfloat16>(a, stream)
                             : choose_keys<__half>(a, stream);
}

}  // namespace kdtree::cuda::sm80
