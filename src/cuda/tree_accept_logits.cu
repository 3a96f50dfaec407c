// tree_accept_logits on CUDA: one cluster of up to 8 blocks a request, 512 threads a block.
//
// The blocks walk down together. At each visited slot every warp takes the best column of its part
// of the row (tree/sample.h), the warps of the cluster send each other their bests, and each finds
// the next slot on its own. Only visited rows are read, 16 bytes a load, five loads in flight.
//
// A row of 163,840 bf16 is 0.33 MB, 41 KB a block: 32 requests with 7 visited slots are 73 MB, 17
// us at 4.3 TB/s. A visited slot costs a memory round trip (1.2 us on an H200), a reduction and an
// exchange (1.5 us) whatever the row. Sampling adds an exchange, so that all know about what the
// best score will be, and about 30 operations a column, mostly Philox, for the vectors that the
// largest noise there is would carry there.
#include "cuda/cluster.h"
#include "cuda/logits.h"
#include "tree/sample.h"
#include "tree/topk.h"
#include "tree/walk.h"

namespace kdtree::cuda {

constexpr int kAcceptThreads = 512;
constexpr int kAcceptWarps = kAcceptThreads / 32;
constexpr int kAcceptLoads = 5;

struct alignas(16) AcceptPart {  // one 16-byte access
  uint64_t key;
  int finite;
};

struct AcceptShared {
  tree::WalkScratch walk;
  // What every warp of the cluster found, at even and at odd steps.
  AcceptPart found[2][kMaxCluster * kAcceptWarps];
  uint32_t first[2][kMaxCluster * kAcceptWarps];  // before that, see first_largest
  cluster::Inbox inbox[2], first_inbox[2];
  // By step: key of a score that some column of this block's part has.
  uint32_t reached[tree::kMaxQlen];
};

__device__ __forceinline__ AcceptPart warp_best(AcceptPart part) {
  const auto high = static_cast<uint32_t>(part.key >> 32), low = static_cast<uint32_t>(part.key);
  const uint32_t most = __reduce_max_sync(0xffffffffu, high);
  const uint32_t column = __reduce_max_sync(0xffffffffu, high == most ? low : 0);
  return {uint64_t(most) << 32 | column, __any_sync(0xffffffffu, part.finite)};
}

// body(vector, its logits, the largest of them or -inf) for each of this thread's vectors below
// `end` in ascending order, kLoads in flight, the last ones perhaps past the part's end and all
// -inf.
template <int kLoads, class T, class Body>
__device__ __forceinline__ void each_vector(const LogitPart<T> &part, int end, Body &&body) {
  for (int tile = part.begin; tile < end; tile += kLoads * kAcceptThreads) {
    const int at = tile + threadIdx.x;
    LogitVector<T> logits[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) logits[load] = part.load(at + load * kAcceptThreads);
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      body(at + load * kAcceptThreads, logits[load], fmaxf(logits[load].max(), -INFINITY));
  }
}

// Whether there is a finite logit, as far as that is not known yet.
template <class T>
__device__ __forceinline__ void see(const LogitVector<T> &logits, float top, tree::Choice &choice) {
  choice.see(top);
  if (top != INFINITY || choice.finite) return;
#pragma unroll
  for (int i = 0; i < LogitVector<T>::kSize; ++i) choice.see(logits[i]);
}

// The largest of this thread's logits, in the lowest column. The vector that holds it is kept and
// its column found at the end.
template <class T>
__device__ __forceinline__ tree::Choice choose_largest(const LogitPart<T> &part) {
  tree::Choice choice;
  LogitVector<T> best{};
  int best_vector = 0;
  each_vector<kAcceptLoads>(part, part.end,
                            [&](int vector, const LogitVector<T> &logits, float top) {
                              see(logits, top, choice);
                              if (!(top > choice.score)) return;
                              choice.score = top;
                              best = logits;
                              best_vector = vector;
                            });
#pragma unroll
  for (int i = LogitVector<T>::kSize - 1; i >= 0; --i)
    if (best[i] == choice.score) choice.column = part.first_column(best_vector) + i;
  return choice;
}

// The largest of the logits that the cluster's threads load first: some column scores about that,
// and most others cannot, whatever their noise.
template <class T>
__device__ __forceinline__ float first_largest(const LogitPart<T> &part, int block, int turn,
                                               int round, AcceptShared &s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = cluster::size();
  float most = -INFINITY;
  each_vector<kAcceptLoads>(
      part, min(part.end, part.begin + 1),
      [&](int, const LogitVector<T> &, float top) { most = fmaxf(most, top); });
  uint32_t key = __reduce_max_sync(0xffffffffu, tree::value_key(most));
  if (threadIdx.x == 0) s.first_inbox[turn].announce(blocks * kAcceptWarps * sizeof key);
  if (lane < blocks)
    s.first_inbox[turn].send(key, &s.first[turn][block * kAcceptWarps + warp], lane);
  s.first_inbox[turn].wait(round);
  for (int i = lane; i < blocks * kAcceptWarps; i += 32) key = max(key, s.first[turn][i]);
  return tree::key_value(__reduce_max_sync(0xffffffffu, key));
}

// Samples from one vector of logits, the first of them that of column `first`. A column is scored
// only where its noise can carry it to `bound`, by a test that errs on the mild side: uniform(word)
// cut off to 23 bits, against e^log_reach, whose margin is beyond all rounding here.
template <class T>
__device__ __forceinline__ void sample(const LogitVector<T> &logits, uint32_t first, float bound,
                                       const tree::Draw &draw, tree::Choice &choice) {
  constexpr int kSize = LogitVector<T>::kSize;
  const uint32_t skip = first % 4;  // words of columns before the vector
  uint32_t word[kSize + 4];
#pragma unroll
  for (int i = 0; i <= kSize; i += 4) {
    if (i == kSize && skip == 0) break;
    const tree::Words4 words = draw.words((first - skip + i) / 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) word[i + j] = words.word[j];
  }
  if (skip & 1) {
#pragma unroll
    for (int i = 0; i < kSize + 2; ++i) word[i] = word[i + 1];
  }
  if (skip & 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) word[i] = word[i + 2];
  }
  const float log2e = 1.44269504f;
  const float scale = draw.inverse * log2e, bias = tree::log_reach(0, bound) * log2e;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float reach = 1 + exp2_near(fmaf(logits[i], scale, bias));
    if (logits[i] > -INFINITY && !(tree::bits_float(0x3f800000u | word[i] >> 9) > reach))
      choice.take(draw.score(logits[i], word[i]), first + i);
  }
}

// The best of this thread's scores, given that some column of the row reaches `bound`.
template <class T>
__device__ __forceinline__ tree::Choice choose_sample(const LogitPart<T> &part, float bound,
                                                      const tree::Draw &draw, uint32_t *reached) {
  tree::Choice choice;
  each_vector<2>(part, part.end, [&](int vector, const LogitVector<T> &logits, float top) {
    see(logits, top, choice);
    const uint32_t key = *static_cast<volatile uint32_t *>(reached);  // a late value does no harm
    if (key != 0) bound = fmaxf(bound, tree::key_value(key));
    bound = fmaxf(bound, fmaxf(choice.score, draw.least_score(top)));
    if (!draw.can_reach(top, bound)) return;
    const float before = choice.score;
    sample(logits, part.first_column(vector), bound, draw, choice);
    if (choice.score > before) atomicMax(reached, tree::value_key(choice.score));
  });
  return choice;
}

template <class T>
__global__ void __launch_bounds__(kAcceptThreads, 2)
    tree_accept_logits_kernel(const __grid_constant__ kdtree_tree_accept_logits_params p) {
  __shared__ AcceptShared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = cluster::size(), block = cluster::rank();
  const int64_t b = blockIdx.x / blocks;
  const int64_t columns = tree::real_columns(p.vocab, 0, p.vocab_size);
  if (threadIdx.x == 0) {
    for (int turn = 0; turn < 2; ++turn) {
      s.inbox[turn].open(1);
      s.first_inbox[turn].open(1);
    }
  }
  if (threadIdx.x < tree::kMaxQlen) s.reached[threadIdx.x] = 0;
  cluster::arrive();
  const int used = tree::clamp_nodes(p.num_nodes[b], p.qlen);
  tree::WarpGroup group;
  if (warp == 0) tree::stage_walk(group, p, b, used, s.walk);
  __syncthreads();
  cluster::wait();

  int steps = 0;
  if (used > 0) {
    tree::Draw draw = tree::make_draw(p, b);
    for (int slot = 0; slot >= 0; ++steps) {
      const int turn = steps & 1;
      draw.position = tree::slot_position(p, b, slot, steps);
      const LogitPart<T> part(
          static_cast<const T *>(p.logits) + b * p.logits_stride_b + slot * p.logits_stride_q,
          columns, block, blocks);

      tree::Choice choice;
      if (draw.greedy()) {
        choice = choose_largest(part);
      } else {
        const float bound = draw.least_score(first_largest(part, block, turn, steps / 2, s));
        choice = choose_sample(part, bound, draw, &s.reached[steps]);
      }
      AcceptPart best = warp_best({choice.key(), choice.finite});
      if (threadIdx.x == 0) s.inbox[turn].announce(blocks * kAcceptWarps * sizeof(AcceptPart));
      if (lane < blocks)
        s.inbox[turn].send(best, &s.found[turn][block * kAcceptWarps + warp], lane);
      s.inbox[turn].wait(steps / 2);
      best = {0, 0};
      for (int i = lane; i < blocks * kAcceptWarps; i += 32) {
        const AcceptPart found = s.found[turn][i];
        best = {max(best.key, found.key), best.finite | found.finite};
      }
      best = warp_best(best);
      const int64_t token = tree::chosen_token(best.key, best.finite != 0);
      if (threadIdx.x == 0) {
        s.walk.slot[steps] = slot;
        s.walk.token[steps] = token;
      }
      slot = token < 0 ? -1 : tree::next_slot(s.walk, slot, token);
    }
  }
  __syncthreads();
  if (block == 0 && warp == 0) tree::write_accept(group, p, b, steps, s.walk);
}

void tree_accept_logits(const kdtree_tree_accept_logits_params &p, Stream stream) {
  with_logits_type(p.logits_dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = tree_accept_logits_kernel<T>;
    const int64_t tiles = ceil_div(p.vocab, kAcceptThreads * LogitVector<T>::kSize);
    launch_clusters("tree_accept_logits", kernel, p.batch,
                    choose_cluster(kernel, p.batch, tiles, 1), kAcceptThreads, 0, stream, p);
  });
}

}  // namespace kdtree::cuda
