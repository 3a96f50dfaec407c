// draft_topk on CUDA: one cluster of up to 8 blocks a row, 512 threads a block, one pass.
//
// Each block streams its part of the row, a 16-byte vector a thread at a time (a tile), and keeps
// the columns that can still be among the k largest. What can is told by a floor under the k-th
// value: with 16 warps, the ceil(k / 16)-th largest of each warp's 32 running maxima belongs to
// that many columns, so the least of these over the warps has k columns at or above it. The floor
// needs no selection and lets some 120 columns of a tile pass for k 64. A row that beats it (it
// ascends, or is all ties) fills the candidate buffer; then the k-th key is found by bisection on
// its bits, which takes the same steps whatever the keys are, and only larger values pass from
// there on. At the end, block 0 collects the candidates of its cluster, selects and sorts.
//
// Keys hold value and column (tree/order.h), so they are distinct and every selection is exact.
//
// Reads the row once: 15 rows x 163,840 bf16 are 4.9 MB, 1.2 us at 4.3 TB/s. An exponential a
// column is 20,480 a block at 16 a cycle and SM, 0.7 us. The rest is latency: 5 tiles of one
// barrier, two cluster barriers, about 20 bisection steps.
#include "cuda/cluster.h"
#include "cuda/logits.h"
#include "tree/topk.h"

namespace kdtree::cuda {

constexpr int kTopkThreads = 512;
constexpr int kTopkWarps = kTopkThreads / 32;
constexpr int kHandedOver = 512;  // candidates that a block gives to its cluster at most
constexpr int kRanked = 128;      // few enough candidates to compare each with each

template <class T>
struct TopkShape {
  static constexpr int kTile = kTopkThreads * LogitRow<T>::kPerVector;
  static constexpr int kCapacity = 2 * kTile;  // candidates: a full tile on top of what is kept
  static_assert(kCapacity >= kMaxCluster * kHandedOver, "block 0 holds what all hand over");
};

// sum of e^(x - top) over the columns seen, for log-sum-exp. Of no use where top is infinite.
struct ExpSum {
  float top, sum;

  __device__ void raise(float other) {
    if (!(other > top)) return;
    if (sum != 0) sum *= __expf(top - other);
    top = other;
  }
  __device__ void add(ExpSum other) {
    raise(other.top);
    if (other.sum != 0) sum += other.sum * __expf(other.top - top);
  }
  __device__ float log() const { return isinf(top) ? top : top + logf(sum); }
};

struct TopkShared {
  uint64_t kept[tree::kMaxK];
  alignas(16) uint32_t floor[2][kTopkWarps];  // alternating, so that one barrier a step is enough
  alignas(16) int count[2][kTopkWarps];
  uint64_t all[kTopkWarps], any[kTopkWarps];
  ExpSum warp[kTopkWarps], block;
  int num_candidates, num_kept;
};

// The n-th largest of a value per lane; 0 when fewer lanes have one that is not 0.
__device__ __forceinline__ uint32_t nth_largest(uint32_t value, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    largest = __reduce_max_sync(0xffffffffu, value);
    const uint32_t holders = __ballot_sync(0xffffffffu, value == largest);
    if ((threadIdx.x & 31) == __ffs(holders) - 1) value = 0;
  }
  return largest;
}

// Of the warp, in every lane.
__device__ __forceinline__ ExpSum warp_total(ExpSum exp_sum) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    ExpSum other;
    other.top = __shfl_down_sync(0xffffffffu, exp_sum.top, distance);
    other.sum = __shfl_down_sync(0xffffffffu, exp_sum.sum, distance);
    exp_sum.add(other);
  }
  exp_sum.top = __shfl_sync(0xffffffffu, exp_sum.top, 0);
  exp_sum.sum = __shfl_sync(0xffffffffu, exp_sum.sum, 0);
  return exp_sum;
}

__device__ __forceinline__ uint64_t warp_and(uint64_t value) {
  return uint64_t(__reduce_and_sync(0xffffffffu, static_cast<uint32_t>(value >> 32))) << 32 |
         __reduce_and_sync(0xffffffffu, static_cast<uint32_t>(value));
}

// Cuts `n` > k distinct keys, written before the last barrier, down to the k largest, in no order.
// Returns a bound that only these k reach: the k-th key, or less.
__device__ uint64_t keep_largest(uint64_t *keys, int n, int k, TopkShared &s) {
  const int thread = threadIdx.x, warp = thread / 32;
  // Bits in which no two keys differ need no step.
  uint64_t all = ~uint64_t(0), any = 0;
  for (int i = thread; i < n; i += kTopkThreads) {
    all &= keys[i];
    any |= keys[i];
  }
  all = warp_and(all);
  any = ~warp_and(~any);
  if (thread % 32 == 0) {
    s.all[warp] = all;
    s.any[warp] = any;
  }
  if (thread == 0) s.num_kept = 0;
  __syncthreads();
  for (int i = 0; i < kTopkWarps; ++i) {
    all &= s.all[i];
    any |= s.any[i];
  }

  uint64_t bound = all;
  int step = 0;
  for (uint64_t open = all ^ any; open != 0; ++step) {
    const uint64_t bit = uint64_t(1) << (63 - __clzll(static_cast<long long>(open)));
    open ^= bit;
    int count = 0;
    for (int i = thread; i < n; i += kTopkThreads) count += keys[i] >= (bound | bit);
    count = __reduce_add_sync(0xffffffffu, count);
    if (thread % 32 == 0) s.count[step & 1][warp] = count;
    __syncthreads();
    count = 0;
#pragma unroll
    for (int i = 0; i < kTopkWarps; ++i) count += s.count[step & 1][i];
    if (count >= k) bound |= bit;
    if (count == k) break;
  }

  for (int i = thread; i < n; i += kTopkThreads)
    if (keys[i] >= bound) s.kept[atomicAdd(&s.num_kept, 1)] = keys[i];
  __syncthreads();
  if (thread < k) keys[thread] = s.kept[thread];
  if (thread == 0) s.num_candidates = k;
  __syncthreads();
  return bound;
}

template <class T>
__global__ void __launch_bounds__(kTopkThreads)
    draft_topk_kernel(const __grid_constant__ kdtree_draft_topk_params p) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ TopkShared s;
  uint64_t *keys = reinterpret_cast<uint64_t *>(dynamic);
  constexpr int kPerVector = LogitRow<T>::kPerVector;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int blocks = cluster::size(), block = cluster::rank();
  const int64_t row_number = blockIdx.x / blocks;
  const LogitRow<T> row(
      static_cast<const T *>(p.logits) +
          tree::lead_offset(p.lead_ndim, p.lead_dims, p.logits_lead_strides, row_number),
      tree::real_columns(p.vocab, p.vocab_start, p.vocab_size));
  const int share = (row.num_vectors() + blocks - 1) / blocks;
  const int begin = block * share, end = min(begin + share, row.num_vectors());

  ExpSum exp_sum = {-INFINITY, 0};
  uint32_t most = 0;   // the thread's largest value so far, as a key; 0: none yet
  uint32_t floor = 0;  // values below it are not among the k largest
  int filled = 0;      // of the buffer, as far as this thread knows
  if (thread == 0) s.num_candidates = 0;
  __syncthreads();

  typename LogitRow<T>::Vector next;
  if (begin + thread < end) next = row.load(begin + thread);
  int step = 0;
  for (int tile = begin; tile < end; tile += kTopkThreads, ++step) {
    const int vector = tile + thread;
    const bool mine = vector < end;
    const auto current = next;
    if (vector + kTopkThreads < end) next = row.load(vector + kTopkThreads);

    float x[kPerVector], top = -INFINITY;
    uint32_t top_key = 0;
    if (mine) {
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        x[i] = fmaxf(to_float(current.value[i]), -INFINITY);  // NaN to -inf
        top = fmaxf(top, x[i]);
      }
      exp_sum.raise(top);
      if (!isinf(exp_sum.top)) {
#pragma unroll
        for (int i = 0; i < kPerVector; ++i) exp_sum.sum += __expf(x[i] - exp_sum.top);
      }
      top_key = tree::value_key(top);
      most = max(most, top_key);
    }

    const uint32_t nth = nth_largest(most, (p.k + kTopkWarps - 1) / kTopkWarps);
    if (lane == 0) s.floor[step & 1][warp] = nth;
    const bool full = __syncthreads_or(filled > TopkShape<T>::kCapacity - TopkShape<T>::kTile);
    uint32_t least = s.floor[step & 1][0];
#pragma unroll
    for (int i = 1; i < kTopkWarps; ++i) least = min(least, s.floor[step & 1][i]);
    floor = max(floor, least);
    if (full) {
      // Later columns with the k-th value come after the ones that are kept.
      const uint64_t bound = keep_largest(keys, s.num_candidates, p.k, s);
      floor = max(floor, static_cast<uint32_t>(bound >> 32) + 1);
      filled = p.k;
    }

    if (mine && top_key >= floor) {
      const int64_t first = row.first(vector);
      int passing = 0;
#pragma unroll
      for (int i = 0; i < kPerVector; ++i)
        passing += first + i >= 0 && first + i < row.columns && tree::value_key(x[i]) >= floor;
      int at = atomicAdd(&s.num_candidates, passing);
      filled = at + passing;
#pragma unroll
      for (int i = 0; i < kPerVector; ++i)
        if (first + i >= 0 && first + i < row.columns && tree::value_key(x[i]) >= floor)
          keys[at++] = tree::topk_key(x[i], static_cast<uint32_t>(first + i));
    }
  }

  exp_sum = warp_total(exp_sum);
  if (lane == 0) s.warp[warp] = exp_sum;
  __syncthreads();
  if (warp == 0) {
    exp_sum = warp_total(lane < kTopkWarps ? s.warp[lane] : ExpSum{-INFINITY, 0});
    if (lane == 0) s.block = exp_sum;
  }
  if (blocks > 1 && s.num_candidates > kHandedOver) keep_largest(keys, s.num_candidates, p.k, s);
  cluster::sync();

  if (block == 0) {
    // Each lane asks one block of the cluster, each warp fetches the candidates of one.
    ExpSum part = {-INFINITY, 0};
    int candidates = 0;
    if (lane < blocks) {
      part = *cluster::peer(&s.block, lane);
      candidates = *cluster::peer(&s.num_candidates, lane);
    }
    const float lse = warp_total(part).log();
    const int other = warp % blocks;
    const int count = __shfl_sync(0xffffffffu, candidates, other);
    const int offset = __reduce_add_sync(0xffffffffu, lane < other ? candidates : 0);
    int n = __reduce_add_sync(0xffffffffu, candidates);
    if (other > 0) {
      const uint64_t *theirs = cluster::peer(keys, other);
      for (int i = thread / (32 * blocks) * 32 + lane; i < count; i += kTopkThreads / blocks)
        keys[offset + i] = theirs[i];
    }
    if (thread == 0) p.lse[row_number] = lse;
    __syncthreads();
    if (n > kRanked) {
      keep_largest(keys, n, p.k, s);
      n = p.k;
    }
    for (int i = thread; i < max(n, p.k); i += kTopkThreads) {
      int rank = i;
      float value = -INFINITY;
      int64_t id = -1;
      if (i < n) {
        rank = 0;
        for (int other = 0; other < n; ++other) rank += keys[other] > keys[i];
        value = tree::key_value(static_cast<uint32_t>(keys[i] >> 32));
        if (p.normalize) value = tree::log_prob(value, lse);
        id = p.vocab_start + tree::key_column(keys[i]);
      }
      if (rank < p.k) {
        p.logprobs[row_number * p.k + rank] = value;
        p.ids[row_number * p.k + rank] = id;
      }
    }
  }
  if (blocks > 1) cluster::sync();  // the others stay until block 0 has read their candidates
}

void draft_topk(const kdtree_draft_topk_params &p, Stream stream) {
  const int64_t rows = tree::lead_rows(p.lead_ndim, p.lead_dims);
  with_logits_type(p.logits_dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = draft_topk_kernel<T>;
    const size_t smem = TopkShape<T>::kCapacity * sizeof(uint64_t);
    allow_smem(kernel, smem);
    launch_clusters("draft_topk", kernel, rows,
                    choose_cluster(kernel, rows, ceil_div(p.vocab, TopkShape<T>::kTile)),
                    kTopkThreads, smem, stream, p);
  });
}

}  // namespace kdtree::cuda
