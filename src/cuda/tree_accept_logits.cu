// tree_accept_logits on CUDA: one cluster of up to 8 blocks a request, 512 threads a block.
//
// The blocks walk down together. At each visited slot every block takes the best column of its part
// of the row (tree/sample.h), the blocks exchange their bests through shared memory, and each finds
// the next slot on its own. Only visited rows are read, 16 bytes a load, four loads in flight.
//
// A row of 163,840 bf16 is 0.33 MB, 41 KB a block: 16 requests with 5 visited slots are 26 MB, 6 us
// at 4.3 TB/s. A visited slot costs a memory round trip, a block reduction and a cluster barrier
// whatever the row; sampling adds about 30 operations a column for Philox, but only where the
// largest noise there is would carry a column past the best so far.
#include "cuda/cluster.h"
#include "cuda/logits.h"
#include "tree/sample.h"
#include "tree/topk.h"
#include "tree/walk.h"

namespace kdtree::cuda {

constexpr int kAcceptThreads = 512;
constexpr int kAcceptWarps = kAcceptThreads / 32;
constexpr int kAcceptLoads = 4;

struct AcceptPart {
  uint64_t key;
  int finite;
};

struct AcceptShared {
  tree::WalkScratch walk;
  // The ones below alternate from slot to slot, so that one barrier a slot is enough.
  AcceptPart block[2][kMaxCluster];  // what every block of the cluster found
  uint32_t reached[2];               // key of a score that some column of this block's part has
  AcceptPart warp[kAcceptWarps];
};

__device__ __forceinline__ AcceptPart warp_best(AcceptPart part) {
  const auto high = static_cast<uint32_t>(part.key >> 32), low = static_cast<uint32_t>(part.key);
  const uint32_t most = __reduce_max_sync(0xffffffffu, high);
  const uint32_t column = __reduce_max_sync(0xffffffffu, high == most ? low : 0);
  return {uint64_t(most) << 32 | column, __any_sync(0xffffffffu, part.finite)};
}

// Samples from one vector of logits, the first of them that of column `first`. Noise is drawn only
// for columns that can reach `bound`.
template <class T>
__device__ __forceinline__ void sample(const typename LogitRow<T>::Vector &logits, int64_t first,
                                       float bound, const tree::Draw &draw, tree::Choice &choice) {
  tree::Words4 words{};
#pragma unroll
  for (int i = 0; i < LogitRow<T>::kPerVector; ++i) {
    const auto column = static_cast<uint32_t>(first + i);
    if (i == 0 || column % 4 == 0) words = draw.words(column / 4);
    const uint32_t even = column & 2 ? words.word[2] : words.word[0];
    const uint32_t odd = column & 2 ? words.word[3] : words.word[1];
    const uint32_t word = column & 1 ? odd : even;
    const float logit = to_float(logits.value[i]);
    if (logit > -INFINITY &&
        !(tree::uniform(word) > __expf(tree::log_reach(draw.scaled(logit), bound))))
      choice.take(draw.score(logit, word), column);
  }
}

// The best of this thread's vectors, in ascending order of columns.
template <class T>
__device__ tree::Choice choose(const LogitRow<T> &row, int begin, int end, const tree::Draw &draw,
                               uint32_t *reached) {
  constexpr int kPerVector = LogitRow<T>::kPerVector;
  tree::Choice choice;
  for (int at = begin + threadIdx.x; at < end; at += kAcceptLoads * kAcceptThreads) {
    typename LogitRow<T>::Vector logits[kAcceptLoads];
#pragma unroll
    for (int load = 0; load < kAcceptLoads; ++load)
      if (at + load * kAcceptThreads < end) logits[load] = row.load(at + load * kAcceptThreads);
#pragma unroll
    for (int load = 0; load < kAcceptLoads; ++load) {
      if (at + load * kAcceptThreads >= end) break;
      const int64_t first = row.first(at + load * kAcceptThreads);
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) top = fmaxf(top, to_float(logits[load].value[i]));
      if (!choice.finite) {
#pragma unroll
        for (int i = 0; i < kPerVector; ++i) choice.see(to_float(logits[load].value[i]));
      }
      if (draw.greedy()) {
        if (!(top > choice.score)) continue;
#pragma unroll
        for (int i = 0; i < kPerVector; ++i)
          choice.take(to_float(logits[load].value[i]), static_cast<uint32_t>(first + i));
        continue;
      }
      const uint32_t key = *static_cast<volatile uint32_t *>(reached);  // a late value does no harm
      float bound = fmaxf(choice.score, draw.least_score(top));
      if (key != 0) bound = fmaxf(bound, tree::key_value(key));
      if (!draw.can_reach(top, bound)) continue;
      const float before = choice.score;
      sample<T>(logits[load], first, bound, draw, choice);
      if (choice.score > before) atomicMax(reached, tree::value_key(choice.score));
    }
  }
  return choice;
}

template <class T>
__global__ void __launch_bounds__(kAcceptThreads, 1)
    tree_accept_logits_kernel(const __grid_constant__ kdtree_tree_accept_logits_params p) {
  __shared__ AcceptShared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = cluster::size(), block = cluster::rank();
  const int64_t b = blockIdx.x / blocks;
  const int64_t columns = tree::real_columns(p.vocab, 0, p.vocab_size);
  const int used = tree::clamp_nodes(p.num_nodes[b], p.qlen);
  tree::WarpGroup group;
  if (warp == 0) tree::stage_walk(group, p, b, used, s.walk);
  if (threadIdx.x == 0) s.reached[0] = 0;
  cluster::sync();  // also: every block has started, and may be written to

  int steps = 0;
  if (used > 0) {
    tree::Draw draw = tree::make_draw(p, b);
    for (int slot = 0; slot >= 0; ++steps) {
      const int turn = steps & 1;
      draw.position = tree::slot_position(p, b, slot, steps);
      const LogitRow<T> row(
          static_cast<const T *>(p.logits) + b * p.logits_stride_b + slot * p.logits_stride_q,
          columns);
      const int share = (row.num_vectors() + blocks - 1) / blocks;
      const int begin = block * share, end = min(begin + share, row.num_vectors());

      const tree::Choice choice = choose(row, begin, end, draw, &s.reached[turn]);
      AcceptPart part = warp_best({choice.key(), choice.finite});
      if (lane == 0) s.warp[warp] = part;
      if (threadIdx.x == 0) s.reached[turn ^ 1] = 0;
      __syncthreads();
      if (warp == 0) {
        part = warp_best(lane < kAcceptWarps ? s.warp[lane] : AcceptPart{0, 0});
        if (lane < blocks) *cluster::peer(&s.block[turn][block], lane) = part;
      }
      cluster::sync();
      uint64_t key = 0;
      int finite = 0;
      for (int other = 0; other < blocks; ++other) {
        key = max(key, s.block[turn][other].key);
        finite |= s.block[turn][other].finite;
      }
      const int64_t token = tree::chosen_token(key, finite != 0);
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
    const int64_t tiles = ceil_div(p.vocab, kAcceptThreads * LogitRow<T>::kPerVector);
    launch_clusters("tree_accept_logits", kernel, p.batch, choose_cluster(kernel, p.batch, tiles),
                    kAcceptThreads, 0, stream, p);
  });
}

}  // namespace kdtree::cuda
