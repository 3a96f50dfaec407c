// tree_accept_logits on CUDA: 512 threads a block, in clusters of 8 blocks where a row is long
// enough. A team of 8, 4, 2 or 1 blocks of a cluster works on a request: as many as the GPU has for
// each live one. With more requests than clusters the blocks count those first, so that the spare
// rows of a captured graph take nobody's place.
//
// The blocks of a team walk down together. At each visited slot every thread takes the best column
// of its part of the row (tree/sample.h); the bests meet in shared memory, then every block sends
// one message to each of the team, and each warp finds the next slot on its own. Only visited rows
// are read, 16 bytes a load, five loads in flight.
//
// A row of 163,840 bf16 is 0.33 MB, 41 KB a block of 8: 32 requests with 7 visited slots are 73 MB,
// 17 us at 4.3 TB/s. A visited slot costs a memory round trip (1.2 us on an H200), reductions and
// an exchange (1 us) whatever the row. Sampling adds an exchange, so that all know about what the
// best score will be, and about 50 operations a column, mostly Philox, for the vectors that the
// largest noise there is would carry there; those come from the cache.
//
// Measured on an H200 in a graph with a cold L2, 6 accepted, an empty kernel being 2.7 us: 19.6 for
// one request, 39.5 for 32, 59 for 64, 22.0 for 4 live ones of 64; sampled, where a row without a
// peak is scored nearly whole, 39.9, 80.5, 134 and 42.5. Two blocks an SM were 14% slower at 32
// requests: they wait for the same memory and exchange more.
#include <algorithm>

#include "cuda/cluster.h"
#include "cuda/live.h"
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

// The best of a warp, in every lane.
__device__ __forceinline__ AcceptPart warp_best(AcceptPart part) {
  const auto high = static_cast<uint32_t>(part.key >> 32), low = static_cast<uint32_t>(part.key);
  const uint32_t most = __reduce_max_sync(0xffffffffu, high);
  const uint32_t column = __reduce_max_sync(0xffffffffu, high == most ? low : 0);
  return {uint64_t(most) << 32 | column, __any_sync(0xffffffffu, part.finite)};
}

// Where a team finds the best of all its threads. Exchanges alternate between two places.
struct Exchange {
  AcceptPart warp[2][kAcceptWarps];
  AcceptPart block[2][kMaxCluster];
  cluster::Inbox inbox[2];

  // By all threads, for exchanges 0, 1, 2... in turn: one message a block to each of the team.
  __device__ __forceinline__ AcceptPart best(AcceptPart mine, const cluster::Team &team,
                                             int number) {
    const int id = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int turn = number & 1, round = number >> 1;
    mine = warp_best(mine);
    if (lane == 0) warp[turn][id] = mine;
    __syncthreads();
    if (threadIdx.x == 0) inbox[turn].announce(team.size * sizeof(AcceptPart));
    if (id < team.size) {
      mine = warp_best(warp[turn][lane % kAcceptWarps]);
      if (lane == 0) inbox[turn].send(mine, &block[turn][team.rank()], team.first() + id);
    }
    inbox[turn].wait(round);
    return warp_best(block[turn][lane & (team.size - 1)]);
  }
};

struct AcceptShared {
  tree::WalkScratch walk;
  int64_t position[tree::kMaxQlen];
  Exchange exchange;
  // By step: key of a score that some column of this block's part has, see choose_sample.
  uint32_t reached[tree::kMaxQlen];
  Share share;
};

// Whether there is a finite logit, as far as that is not known yet.
template <class T>
__device__ __forceinline__ void see(const LogitVector<T> &logits, float top, tree::Choice &choice) {
  choice.see(top);
  if (top != INFINITY || choice.finite) return;
#pragma unroll
  for (int i = 0; i < LogitVector<T>::kSize; ++i) choice.see(logits[i]);
}

// The largest of this thread's logits, in the lowest column. Which vector holds it is kept, and its
// column found at the end.
template <class T>
__device__ __forceinline__ tree::Choice choose_largest(const LogitPart<T> &part) {
  tree::Choice choice;
  int best = part.begin;  // vector
  // The last loads may be past the part's end, and all -inf.
  for (int at = part.begin + threadIdx.x; at < part.end; at += kAcceptLoads * kAcceptThreads) {
    LogitVector<T> logits[kAcceptLoads];
#pragma unroll
    for (int i = 0; i < kAcceptLoads; ++i) logits[i] = part.load(at + i * kAcceptThreads);
#pragma unroll
    for (int i = 0; i < kAcceptLoads; ++i) {
      const float top = fmaxf(logits[i].max(), -INFINITY);
      see(logits[i], top, choice);
      if (!(top > choice.score)) continue;
      choice.score = top;
      best = at + i * kAcceptThreads;
    }
  }
  const LogitVector<T> logits = part.load(best);
#pragma unroll
  for (int i = LogitVector<T>::kSize - 1; i >= 0; --i)
    if (logits[i] == choice.score) choice.column = part.first_column(best) + i;
  return choice;
}

// Samples from one vector of logits, the first of them that of column `first`. A column is scored
// only where its noise can carry it to `bound`, by a test that errs on the mild side: uniform(word)
// cut off to 23 bits, against e^log_reach, whose margin is beyond all rounding here.
template <class T>
__device__ __forceinline__ void sample(const LogitVector<T> &logits, uint32_t first, float bound,
                                       const tree::Draw &draw, tree::Choice &choice) {
  constexpr int kSize = LogitVector<T>::kSize, kPerWord = 4 / sizeof(T), kFour = sizeof(T);
  constexpr int kWords = 4 + (3 + kPerWord - 1) / kPerWord;  // with up to three columns before
  const float log2e = 1.44269504f;
  const float scale = draw.inverse * log2e, bias = tree::log_reach(0, bound) * log2e;
  // Four columns share a draw; a vector may start within one, and is moved up to where it starts.
  uint32_t word[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) word[i] = i < 4 ? logits.word[i] : LogitWord<T>::kMinusInfinity;
  const int skip = first % 4;
#pragma unroll 1
  for (int i = 0; i < skip; ++i) {
#pragma unroll
    for (int j = kWords - 1; j >= 0; --j)
      word[j] = __funnelshift_lc(j > 0 ? word[j - 1] : LogitWord<T>::kMinusInfinity, word[j],
                                 8 * sizeof(T));
  }
#pragma unroll 1
  for (int i = -skip; i < kSize; i += 4) {
    const tree::Words4 words = draw.words((first + i) / 4);
    float logit[4];
    uint32_t close = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      logit[j] = LogitWord<T>::number(word[j / kPerWord], j % kPerWord);
      const float reach = 1 + exp2_near(fmaf(logit[j], scale, bias));
      if (logit[j] > -INFINITY && !(tree::bits_float(0x3f800000u | words.word[j] >> 9) > reach))
        close |= 1u << j;
    }
    for (; close != 0; close &= close - 1) {  // seldom
      const int j = tree::lowest_lane(close);
      const float its_logit = j < 2 ? (j < 1 ? logit[0] : logit[1]) : j < 3 ? logit[2] : logit[3];
      const uint32_t its_word = j < 2   ? (j < 1 ? words.word[0] : words.word[1])
                                : j < 3 ? words.word[2]
                                        : words.word[3];
      choice.take(draw.score(its_logit, its_word), first + i + j);
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j)
      word[j] = j + kFour < kWords ? word[j + kFour] : LogitWord<T>::kMinusInfinity;
  }
}

// The best of this thread's scores, given its largest logit, and that some column of the row
// reaches `bound`. What it reads is in a cache.
template <class T>
__device__ __forceinline__ tree::Choice choose_sample(const LogitPart<T> &part, float most,
                                                      float bound, const tree::Draw &draw,
                                                      uint32_t *reached) {
  tree::Choice choice;
  if (!draw.can_reach(most, bound)) return choice;
#pragma unroll 1
  for (int vector = part.begin + threadIdx.x; vector < part.end; vector += kAcceptThreads) {
    const LogitVector<T> logits = part.load(vector);
    const float top = fmaxf(logits.max(), -INFINITY);
    const uint32_t key = *static_cast<volatile uint32_t *>(reached);  // a late value does no harm
    if (key != 0) bound = fmaxf(bound, tree::key_value(key));
    bound = fmaxf(bound, fmaxf(choice.score, draw.least_score(top)));
    if (!draw.can_reach(top, bound)) continue;
    const float before = choice.score;
    sample(logits, part.first_column(vector), bound, draw, choice);
    if (choice.score > before) atomicMax(reached, tree::value_key(choice.score));
  }
  return choice;
}

// One request; all threads of its team.
template <class T>
__device__ __forceinline__ void accept_request(const kdtree_tree_accept_logits_params &p, int b,
                                               const cluster::Team &team, AcceptShared &s) {
  tree::BlockGroup<kAcceptThreads> group;
  const int used = tree::clamp_nodes(p.num_nodes[b], p.qlen);
  tree::stage_walk(group, p, b, used, s.walk);
  tree::for_slots(group, p.qlen, [&](int slot) {
    if (p.positions != nullptr) s.position[slot] = tree::slot_position(p, b, slot, 0);
    s.reached[slot] = 0;
  });
  tree::Draw draw = tree::make_draw(p, b);
  __syncthreads();

  const int64_t columns = tree::real_columns(p.vocab, 0, p.vocab_size);
  int steps = 0;
  for (int slot = used > 0 ? 0 : -1; slot >= 0; ++steps) {
    if (threadIdx.x == 0) s.walk.slot[steps] = slot;  // which is read from there: registers are few
    const LogitPart<T> part(static_cast<const T *>(p.logits) + int64_t(b) * p.logits_stride_b +
                                slot * p.logits_stride_q,
                            columns, team.rank(), team.size);
    tree::Choice choice = choose_largest(part);
    const int exchange = draw.greedy() ? steps : 2 * steps;
    AcceptPart best = s.exchange.best({choice.key(), choice.finite}, team, exchange);
    if (!draw.greedy()) {
      // What the row's largest logit scores at least, most columns cannot, whatever their noise.
      const float bound = tree::key_value(static_cast<uint32_t>(best.key >> 32));
      draw.position = p.positions != nullptr ? s.position[s.walk.slot[steps]] : steps;
      choice = choose_sample(part, choice.score, draw.least_score(bound), draw, &s.reached[steps]);
      best = s.exchange.best({choice.key(), best.finite}, team, exchange + 1);
    }
    const int64_t token = tree::chosen_token(best.key, best.finite != 0);
    if (threadIdx.x == 0) s.walk.token[steps] = token;
    slot = token < 0 ? -1 : tree::next_slot(s.walk, s.walk.slot[steps], token);
  }
  __syncthreads();
  tree::WarpGroup warp;
  if (team.rank() == 0 && threadIdx.x < 32) tree::write_accept(warp, p, b, steps, s.walk);
}

template <class T>
__global__ void __launch_bounds__(kAcceptThreads, 2)
    tree_accept_logits_kernel(const __grid_constant__ kdtree_tree_accept_logits_params p) {
  __shared__ AcceptShared s;
  if (threadIdx.x == 0) {
    for (auto &inbox : s.exchange.inbox) inbox.open(1);
  }
  cluster::arrive();
  const auto is_live = [&](int64_t b) { return p.num_nodes[b] > 0; };
  const bool many = p.batch > cluster::clusters();
  cluster::Team team{cluster::size()};
  int request = cluster::id();
  if (many) {
    if (threadIdx.x < 32) {
      const Share share = share_out(p.batch, 1, is_live);
      if (threadIdx.x == 0) s.share = share;
    }
    __syncthreads();
    team = s.share.team;
    request = s.share.request;
  }
  cluster::wait();
  if (request >= 0) accept_request<T>(p, request, team, s);
  tree::BlockGroup<kAcceptThreads> group;
  if (many)
    for_padding(p.batch, s.share, is_live,
                [&](int64_t b) { tree::write_accept(group, p, b, 0, s.walk); });
}

void tree_accept_logits(const kdtree_tree_accept_logits_params &p, Stream stream) {
  with_logits_type(p.logits_dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = tree_accept_logits_kernel<T>;
    const int64_t tiles = ceil_div(p.vocab, kAcceptThreads * LogitVector<T>::kSize);
    // A block an SM, two where the clusters' places do not come out; and one a request at least.
    const int64_t room = num_sms();
    const int size = p.batch > room ? 1 : choose_cluster(kernel, 1, tiles, 1);
    const int64_t clusters = std::min(p.batch, std::max(room / size, ceil_div(p.batch, size)));
    launch_clusters("tree_accept_logits", kernel, clusters, size, kAcceptThreads, 0, stream, p);
  });
}

}  // namespace kdtree::cuda
