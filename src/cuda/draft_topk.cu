// draft_topk on CUDA: one cluster of up to 8 blocks a row, 512 threads a block, one pass.
//
// A thread loads 5 vectors of 16 bytes at once: a round, of 20,480 bf16 columns a block, taken from
// all over its part of the row. The first round is cut into 128 groups by thread. The k-th largest
// of the groups' maxima is a floor: k columns reach it, so no other is among the k largest. With
// k 64 some 90 columns of a cluster's round do. Further rounds need no barrier: a vector whose
// largest logit is below the floor only adds its exponentials, others also go to a list in shared
// memory. In a part of more than 8 rounds the floor is found anew after 2, 4, 8... of them, or the
// list would not do. When all are read, the maxima give the last floor, what reaches it goes to
// block 0, and block 0 compares each with each.
//
// A row can beat the floor (it ascends, or is all ties) and overflow the list. Then the block reads
// its part again with a barrier a tile, and cuts its candidates down to k by bisection on the bits
// of the keys, which takes the same steps whatever the keys are.
//
// With root_tokens a row may be padding. Where the GPU has 4 blocks for each row anyway, those of a
// padding row soon end. Where it has not, there are no more blocks than run at the same time, in
// clusters of 4; they count the live rows, and 4 or 2 of them take one row where that serves all,
// else each block takes several, one after the other.
//
// Keys hold value and column (tree/order.h), so they are distinct and every selection is exact.
//
// Reads the row once: 15 rows x 163,840 bf16 are 4.9 MB, 1.2 us at 4.3 TB/s, and 480 rows 37 us. An
// exponential a column at 16 a cycle and SM is 0.7 us with 8 blocks a row, and 21 us for 480 rows.
// Measured on an H200: 13 us and 70 us. The first is latency: launch, load, two exchanges, and
// about 1 us for each stretch of code that is not in a cache. 60 live rows of 960 take 20.4 us, of
// 60 19.5; where all are live, sharing them out costs 2 to 7% (129 us of 960, 122 without
// root_tokens). 480 rows of float32, which are twice the bytes, take 124 us.
#include <algorithm>

#include "cuda/cluster.h"
#include "cuda/live.h"
#include "cuda/logits.h"
#include "tree/topk.h"

namespace kdtree::cuda {

constexpr int kTopkThreads = 512;
constexpr int kTopkWarps = kTopkThreads / 32;
// Vectors in flight, a thread. Five would spill where there are four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kTopkLoads = 4;
#else
constexpr int kTopkLoads = 5;
#endif
constexpr int kTrusted = 8;        // rounds that the floor of the first one serves
constexpr int kGroups = 128;       // of columns, for the floor
constexpr int kListed = 1024;      // vectors of which some column may be a candidate
constexpr int kMostShared = 4096;  // requests whose live rows are shared out
// Candidates that the blocks of a cluster give to block 0 at most.
constexpr int kHandedOver = 1024;
constexpr int kRanked = 256;  // few enough candidates to compare each with each
static_assert(kGroups == kTopkWarps * kMaxCluster && kGroups >= tree::kMaxK);
static_assert(kHandedOver / kMaxCluster >= tree::kMaxK);

// An SM's; of float32 two would be short of registers.
template <class T>
constexpr int kTopkBlocks = kSmallShared || sizeof(T) == 4 ? 1 : 2;

template <class T>
struct TopkShape {
  static constexpr int kTile = kTopkThreads * LogitVector<T>::kSize;
  static constexpr int kCapacity = kTile + kHandedOver;  // of the list
};

// e^(x - top) in one multiply-add and one power of two. The product with `top` is rounded, which
// moves the log-sum-exp by no more than its last bit. Where top is too large for that, the sum is
// below its last bit, and all finite terms count the same.
struct ExpTerm {
  float scale, bias;

  __device__ __forceinline__ explicit ExpTerm(float top) {
    const bool tame = fabsf(top) < 0x1p30f;
    scale = tame ? 1.44269504f : 0x1p-126f;
    bias = tame ? -1.44269504f * top : 0;
  }
  __device__ __forceinline__ float operator()(float x) const {
    return exp2_near(fmaf(x, scale, bias));
  }
};

// sum of e^(x - top) over the columns seen, for log-sum-exp. Of no use where top is infinite.
struct ExpSum {
  float top, sum;

  __device__ __forceinline__ void raise(float other) {
    if (other > top) sum *= ExpTerm(other)(top);
    top = fmaxf(top, other);
  }
  template <class T>
  __device__ __forceinline__ void add(const LogitVector<T> &logits, const ExpTerm &term) {
    float part[LogitVector<T>::kSize];
#pragma unroll
    for (int i = 0; i < LogitVector<T>::kSize; ++i) part[i] = term(logits[i]);
#pragma unroll
    for (int width = LogitVector<T>::kSize / 2; width > 0; width /= 2)
#pragma unroll
      for (int i = 0; i < width; ++i) part[i] += part[i + width];
    sum += part[0];
  }
  __device__ float log() const { return isinf(top) ? top : top + logf(sum); }
};

struct alignas(16) Handed {  // by a block to block 0
  ExpSum exp_sum;
  int candidates;
};

struct TopkShared {
  uint64_t handed[kHandedOver];
  uint64_t kept[tree::kMaxK];
  alignas(16) uint32_t maxima[2][kGroups];
  alignas(16) int count[2][kTopkWarps];  // alternating, so that one barrier a step is enough
  uint64_t all[kTopkWarps], any[kTopkWarps];
  ExpSum warp[kTopkWarps];
  Handed block[kMaxCluster];
  int listed[kListed];  // which vectors
  int num_listed, num_candidates, num_kept;
  int row;  // where rows are shared out
  Share share;
  float floor[2];
  cluster::Inbox maxima_inbox[2], candidates_inbox;
};

__device__ __forceinline__ float warp_max(float value) {
  return tree::key_value(__reduce_max_sync(0xffffffffu, tree::value_key(value)));
}

// Of the warp, in every lane.
__device__ __forceinline__ ExpSum warp_total(ExpSum exp_sum) {
  exp_sum.raise(warp_max(exp_sum.top));
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    exp_sum.sum += __shfl_xor_sync(0xffffffffu, exp_sum.sum, distance);
  return exp_sum;
}

// Puts the columns below `until` that reach the floor on the list of candidates, as far as there is
// room.
template <class T>
__device__ __noinline__ void collect(LogitVector<T> logits, uint32_t first, uint32_t until,
                                     float floor, uint64_t *keys, int *num_candidates) {
#pragma unroll
  for (int i = 0; i < LogitVector<T>::kSize; ++i) {
    if (!(logits[i] >= floor && first + i < until)) continue;
    const int at = atomicAdd(num_candidates, 1);
    if (at < TopkShape<T>::kCapacity) keys[at] = tree::topk_key(logits[i], first + i);
  }
}

__device__ __forceinline__ uint64_t warp_and(uint64_t value) {
  return uint64_t(__reduce_and_sync(0xffffffffu, static_cast<uint32_t>(value >> 32))) << 32 |
         __reduce_and_sync(0xffffffffu, static_cast<uint32_t>(value));
}

// Cuts `n` > k distinct keys, written before the last barrier, down to the k largest, in no order.
// Returns a bound that only these k reach: the k-th key, or less.
__device__ __noinline__ uint64_t keep_largest(uint64_t *keys, int n, int k, TopkShared &s) {
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

// What this block reads of its team's row.
template <class T>
__device__ __forceinline__ LogitPart<T> part_of_row(const kdtree_draft_topk_params &p, int row,
                                                    const cluster::Team &team) {
  return {static_cast<const T *>(p.logits) +
              tree::lead_offset(p.lead_ndim, p.lead_dims, p.logits_lead_strides, row),
          tree::real_columns(p.vocab, p.vocab_start, p.vocab_size), team.rank(), team.size};
}

// The candidates of a part that has too many at the floor for the list.
template <class T>
__device__ __noinline__ void collect_again(LogitPart<T> part, float floor, int k, uint64_t *keys,
                                           TopkShared &s) {
  using Shape = TopkShape<T>;
  __syncthreads();
  if (threadIdx.x == 0) s.num_candidates = 0;
  for (int tile = part.begin; tile < part.end; tile += kTopkThreads) {
    const int vector = tile + threadIdx.x;
    auto logits = part.load(vector);
    logits.nan_to_minus_infinity();
    __syncthreads();
    collect<T>(logits, part.first_column(vector), part.until, floor, keys, &s.num_candidates);
    __syncthreads();
    if (s.num_candidates > Shape::kCapacity - Shape::kTile) {
      // Later columns with the k-th value come after the ones that are kept.
      const uint64_t bound = keep_largest(keys, s.num_candidates, k, s);
      floor = tree::key_value(static_cast<uint32_t>(bound >> 32) + 1);
    }
  }
  __syncthreads();
}

// A group is the columns of 4 threads a block: 128 in a team of any size. Sends their maxima to
// every block of it. Its number in the low bits makes a group's maximum unique, at the cost of a
// floor that is 2^-16 lower. Returns the warp's maximum.
__device__ __forceinline__ float send_maxima(float top, int turn, const cluster::Team &team,
                                             TopkShared &s) {
  const int blocks = team.size, block = team.rank();
  const int lane = threadIdx.x % 32, lanes = 4 * blocks;  // of a group
  int distance = 1;
  for (; distance < lanes; distance *= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
  const int group = (block * kTopkThreads + threadIdx.x) / lanes;
  if (lane % lanes < blocks) {
    const uint32_t key = (tree::value_key(top) & ~uint32_t(kGroups - 1)) | group;
    s.maxima_inbox[turn].send(key, &s.maxima[turn][group], team.first() + lane % lanes,
                              team.alone());
  }
  for (; distance < 32; distance *= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
  return top;
}

// The k-th largest maximum. Four threads a group count the groups above it.
__device__ __forceinline__ float find_floor(int k, int exchange, bool alone, TopkShared &s) {
  const int turn = exchange & 1;
  const int group = threadIdx.x / 4, quarter = threadIdx.x % 4;
  s.maxima_inbox[turn].wait(exchange >> 1, alone);
  int above = 0;
  const uint32_t maximum = s.maxima[turn][group];
#pragma unroll
  for (int i = 0; i < kGroups / 16; ++i) {
    const uint4 other = reinterpret_cast<const uint4 *>(s.maxima[turn])[i * 4 + quarter];
    above += (other.x > maximum) + (other.y > maximum) + (other.z > maximum) + (other.w > maximum);
  }
  above += __shfl_xor_sync(0xffffffffu, above, 1);
  above += __shfl_xor_sync(0xffffffffu, above, 2);
  if (above + 1 == k && quarter == 0)
    s.floor[turn] =
        tree::key_value(max(maximum & ~uint32_t(kGroups - 1), tree::value_key(-INFINITY)));
  __syncthreads();
  return s.floor[turn];
}

// What rows of padding requests are. Out of line: registers.
__device__ __noinline__ void write_padding(const kdtree_draft_topk_params &p, int64_t row,
                                           int rows) {
  for (int64_t i = threadIdx.x; i < int64_t(rows) * p.k; i += kTopkThreads) {
    p.logprobs[row * p.k + i] = -INFINITY;
    p.ids[row * p.k + i] = -1;
  }
  for (int i = threadIdx.x; i < rows; i += kTopkThreads) p.lse[row + i] = -INFINITY;
}

// One row, by all threads of a team: where kMany s.row, else the cluster's. Only a block alone
// takes more than one. Exchanges of maxima alternate between two places: who sends to one again has
// heard from everybody since they read it.
template <class T, bool kMany>
__device__ __forceinline__ void topk_row(const kdtree_draft_topk_params &p, int per_request,
                                         bool first, unsigned char *dynamic, TopkShared &s) {
  const auto team_of = [&] { return kMany ? s.share.team : cluster::Team{cluster::size()}; };
  auto *list = reinterpret_cast<LogitVector<T> *>(dynamic);
  auto *keys = reinterpret_cast<uint64_t *>(list + kListed);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const auto announce = [&](int exchange) {
    if (thread == 0) s.maxima_inbox[exchange & 1].announce(sizeof s.maxima[0], team_of().alone());
  };
  const bool padding =
      !kMany && p.root_tokens != nullptr && !tree::is_live_request(p, cluster::id() / per_request);
  const auto part = part_of_row<T>(p, kMany ? s.row : cluster::id(), team_of());

  // A round takes tiles from all over the part, so that the first one is a fair sample.
  const int rounds =
      max(1, (part.share + kTopkLoads * kTopkThreads - 1) / (kTopkLoads * kTopkThreads));
  const int stride = rounds * kTopkThreads;
  int at = part.begin + thread;
  LogitVector<T> logits[kTopkLoads];
#pragma unroll
  for (int i = 0; i < kTopkLoads; ++i) logits[i] = part.load(at + i * stride);
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < kTopkLoads; ++i) {
    logits[i].nan_to_minus_infinity();
    most = fmaxf(most, logits[i].max());
  }
  if (first) cluster::wait();
  if (padding) {
    if (cluster::rank() == 0) write_padding(p, cluster::id(), 1);
    return;
  }
  announce(0);
  ExpSum exp_sum = {send_maxima(most, 0, team_of(), s), 0};
  ExpTerm term(exp_sum.top);
#pragma unroll
  for (int i = 0; i < kTopkLoads; ++i) exp_sum.add(logits[i], term);
  float floor = find_floor(p.k, 0, team_of().alone(), s);
  exp_sum.raise(floor);  // from here on, what is above top is above the floor too
  term = ExpTerm(exp_sum.top);
  int exchanges = 1;

  const auto list_vector = [&](const LogitVector<T> &logits, int vector) {
    const int place = atomicAdd(&s.num_listed, 1);
    if (place >= kListed) return;
    list[place] = logits;
    s.listed[place] = vector;
  };
#pragma unroll
  for (int i = 0; i < kTopkLoads; ++i) {
    if (most >= floor && logits[i].max() >= floor) list_vector(logits[i], at + i * stride);
    if (rounds > 1) logits[i] = part.load(at + kTopkThreads + i * stride);
  }
  for (int round = 1; round < rounds; ++round) {
    at += kTopkThreads;
#pragma unroll
    for (int i = 0; i < kTopkLoads; ++i) {
      logits[i].nan_to_minus_infinity();
      const float top = logits[i].max();
      most = fmaxf(most, top);
      if (top >= floor) {
        list_vector(logits[i], at + i * stride);
        exp_sum.raise(top);
        term = ExpTerm(exp_sum.top);
      }
      exp_sum.add(logits[i], term);
      if (round + 1 < rounds) logits[i] = part.load(at + kTopkThreads + i * stride);
    }
    // The floor of a small sample would list too many of a long part.
    if (round + 1 == rounds || (rounds > kTrusted && (round & (round + 1)) == 0)) {
      announce(exchanges);
      send_maxima(most, exchanges & 1, team_of(), s);
      floor = find_floor(p.k, exchanges++, team_of().alone(), s);
      exp_sum.raise(floor);
      term = ExpTerm(exp_sum.top);
    }
  }
  if (rounds == 1) __syncthreads();
  exp_sum = warp_total(exp_sum);
  if (lane == 0) s.warp[warp] = exp_sum;
  for (int i = thread; i < min(s.num_listed, kListed); i += kTopkThreads)
    collect<T>(list[i], part.first_column(s.listed[i]), part.until, floor, keys, &s.num_candidates);
  __syncthreads();
  if (s.num_listed > kListed || s.num_candidates > TopkShape<T>::kCapacity)
    collect_again<T>(part, floor, p.k, keys, s);
  const cluster::Team team = team_of();
  const int blocks = team.size, block = team.rank();
  const bool alone = team.alone();
  const int most_handed = kHandedOver / blocks;
  if (s.num_candidates > most_handed) keep_largest(keys, s.num_candidates, p.k, s);
  const int candidates = s.num_candidates;
  const int sent = block > 0 ? candidates : 0;  // block 0 has its own where they are to be
  for (int i = thread; i < sent; i += kTopkThreads)
    s.candidates_inbox.send(keys[i], &s.handed[block * most_handed + i], team.first(), alone);
  if (warp == 0) {
    exp_sum = warp_total(lane < kTopkWarps ? s.warp[lane] : ExpSum{-INFINITY, 0});
    if (lane == 0) {
      s.candidates_inbox.announce_to(team.first(), sent * sizeof(uint64_t) + sizeof(Handed), alone);
      s.candidates_inbox.send(Handed{exp_sum, candidates}, &s.block[block], team.first(), alone);
    }
  }
  if (block != 0) return;
  const int64_t row = kMany ? s.row : cluster::id();
  s.candidates_inbox.wait(0, alone);

  // Each warp moves what one of the other blocks handed over, to behind what block 0 has.
  const int from = warp % blocks, handed = lane < blocks ? s.block[lane].candidates : 0;
  const float lse = warp_total(lane < blocks ? s.block[lane].exp_sum : ExpSum{-INFINITY, 0}).log();
  const int offset = __reduce_add_sync(0xffffffffu, lane < from ? handed : 0);
  int n = __reduce_add_sync(0xffffffffu, handed);
  for (int i = thread / (32 * blocks) * 32 + lane; from > 0 && i < s.block[from].candidates;
       i += kTopkThreads / blocks)
    keys[offset + i] = s.handed[from * most_handed + i];
  if (thread == 0) p.lse[row] = lse;
  __syncthreads();
  if (n > kRanked) {
    keep_largest(keys, n, p.k, s);
    n = p.k;
  }
  // Four threads a candidate count the ones above it; places that nobody takes are empty.
  for (int first = 0; first < max(n, p.k); first += kTopkThreads / 4) {
    const int i = first + thread / 4;
    const uint64_t key = i < n ? keys[i] : 0;
    int rank = 0;
    for (int other = thread % 4; other < n; other += 4) rank += keys[other] > key;
    rank += __shfl_xor_sync(0xffffffffu, rank, 1);
    rank += __shfl_xor_sync(0xffffffffu, rank, 2);
    if (i >= n) rank = i;
    if (rank >= p.k || thread % 4 != 0) continue;
    float value = -INFINITY;
    int64_t id = -1;
    if (i < n) {
      value = tree::key_value(static_cast<uint32_t>(key >> 32));
      if (p.normalize) value = tree::log_prob(value, lse);
      id = p.vocab_start + tree::key_column(key);
    }
    p.logprobs[row * p.k + rank] = value;
    p.ids[row * p.k + rank] = id;
  }
}

// By one thread, before the block's first row.
__device__ __forceinline__ void prepare(const cluster::Team &team, TopkShared &s) {
  s.num_listed = s.num_candidates = 0;
  for (auto &inbox : s.maxima_inbox) inbox.open(1);
  s.candidates_inbox.open(team.size);
}

// per_request: rows. kMany: there are no more blocks than run at once, and the rows of the live
// requests are shared out to them.
template <class T, bool kMany>
__global__ void __launch_bounds__(kTopkThreads, kTopkBlocks<T>)
    draft_topk_kernel(const __grid_constant__ kdtree_draft_topk_params p, int per_request) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ TopkShared s;
  if constexpr (!kMany) {
    if (threadIdx.x == 0) prepare({cluster::size()}, s);
    cluster::arrive();
    topk_row<T, false>(p, per_request, true, dynamic, s);
  } else {
    const auto live = [&](int64_t request) { return tree::is_live_request(p, request); };
    if (threadIdx.x < 32) {
      const Share share = share_out(p.lead_dims[0], per_request, live);
      if (threadIdx.x == 0) {
        s.share = share;
        s.row = share.request * per_request + share.place % per_request;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) prepare(s.share.team, s);
    cluster::arrive();
    if (s.share.place >= s.share.live) cluster::wait();
    for (bool first = true; s.share.place < s.share.live; first = false) {
      topk_row<T, true>(p, per_request, first, dynamic, s);
      __syncthreads();
      if (threadIdx.x < 32) {
        const uint32_t place = s.share.place + s.share.team.teams();
        int request = 0;
        if (place < s.share.live) request = find_live(p.lead_dims[0], place / per_request, live).it;
        __syncwarp();
        if (threadIdx.x == 0) {
          s.num_listed = s.num_candidates = 0;
          s.share.place = place;
          s.row = request * per_request + place % per_request;
        }
      }
      __syncthreads();
    }
    for_padding(p.lead_dims[0], s.share, live,
                [&](int64_t b) { write_padding(p, b * per_request, per_request); });
  }
}

void draft_topk(const kdtree_draft_topk_params &p, Stream stream) {
  const int64_t rows = tree::lead_rows(p.lead_ndim, p.lead_dims);
  const int per_request = p.lead_ndim > 0 ? static_cast<int>(rows / p.lead_dims[0]) : 1;
  with_logits_type(p.logits_dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t parts = ceil_div(p.vocab, TopkShape<T>::kTile);
    const size_t smem =
        kListed * sizeof(LogitVector<T>) + TopkShape<T>::kCapacity * sizeof(uint64_t);
    const auto launch_rows = [&](auto kernel, int64_t clusters, int size) {
      launch_clusters("draft_topk", kernel, clusters, size, kTopkThreads, smem, stream, p,
                      per_request);
    };
    const auto kernel = draft_topk_kernel<T, false>, many = draft_topk_kernel<T, true>;
    allow_smem(kernel, smem);
    const int per_sm = blocks_per_sm(kernel, kTopkThreads, smem);
    const int size = choose_cluster(kernel, rows, parts, per_sm);
    if (p.root_tokens == nullptr) return launch_rows(kernel, rows, size);
    // Few of the rows may be live, and want 4 blocks each. A block looks for each of its rows among
    // all requests, which are not to be too many.
    const int most = choose_cluster(kernel, 1, std::min<int64_t>(parts, 4), per_sm);
    if ((size >= most && rows <= int64_t(per_sm) * num_sms()) || p.lead_dims[0] > kMostShared)
      return launch_rows(kernel, rows, size);
    allow_smem(many, smem);
    const int64_t room = clusters_at_once(many, most, kTopkThreads, smem);
    launch_rows(many, std::min(rows, std::max<int64_t>(1, room)), most);
  });
}

}  // namespace kdtree::cuda
