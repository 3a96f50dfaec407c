// verify_attn on sm_90: wgmma, TMA. README.md explains the schedule.
//
// A block takes one tile of 64 rows of a request and a piece of its keys, 64 keys at a time.
// Warpgroup 0 owns the left 256 columns of the output, warpgroup 1 the right ones, in registers;
// scores of even key blocks are warpgroup 0's, of odd ones warpgroup 1's, and the probabilities
// reach the other one through shared memory. A third warpgroup brings keys into two buffers.
//
// Per row and key 1,088 multiply-adds; 64 rows do 121 FLOP per byte of a key, so the matrix units
// (790 TF) bound it.
#include <algorithm>
#include <cmath>

#include "cuda/attention/kernels.h"
#include "cuda/attention/numeric.h"
#include "cuda/attention/sm90/instructions.h"
#include "cuda/launch.h"

namespace kdtree::cuda::sm90 {

using attention::kDim;
using attention::KeyRange;
using attention::kLatent;
using attention::pack;
using attention::Params;
using attention::Request;
using attention::unpack;

constexpr int kRows = 64;
constexpr int kKeys = 64;           // of a key block
constexpr int kPanels = kDim / 64;  // of 64 features: 128 bytes of a row
constexpr int kPanelBytes = 64 * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kConsumers = 256;
constexpr int kProducers = 128;
constexpr int kThreads = kConsumers + kProducers;
// A key block comes and goes in two pieces: the left half of its values, and the rest. A piece is
// 8 keys by its panels, then the next 8 keys: so the copy engine leaves it, a whole page at a time.
__host__ __device__ constexpr int first_panel(int piece) {
  return piece == 0 ? 0 : piece == 1 ? 4 : kPanels;
}
__host__ __device__ constexpr int piece_panels(int piece) {
  return first_panel(piece + 1) - first_panel(piece);
}
__host__ __device__ constexpr int piece_start(int piece) {
  return first_panel(piece) * kPanelBytes;
}
// A maximum that grows by less than this (in log2) leaves the old one in use: probabilities stay
// below 2^8, and the output is seldom rescaled.
constexpr float kSlack = 8;

enum Barrier { kConsumerBarrier = 1, kProducerBarrier, kReadyBarrier, kLeftBarrier, kRightBarrier };

struct Keys {
  CUtensorMap pieces[2];  // boxes: [page, 8 keys, panel, key, 64 features]
  int box_rows;           // min(page_size, 64), or 0 where the copy engine is not used
};

// What a block works on: rows first_row.. of a request, and a piece of its keys.
struct Block {
  Request request;
  KeyRange keys;
  int first_row, rows;
  int place;  // of its partial results; negative: the results are whole
  int steps;  // key blocks; from `plain` on they hold positions of the tree or past the end
  int plain;
  int boxed;  // steps that the copy engine brings; the others are gathered
};

// Returns whether there is anything to do.
__device__ __forceinline__ bool read_block(const Params &a, const Keys &keys, Block &block) {
  block.first_row = blockIdx.x % a.tiles * kRows;
  block.rows = min(kRows, a.rows - block.first_row);
  const int number = blockIdx.x / a.tiles;
  if (a.parts > 0) {
    const attention::Piece piece = a.pieces[number];
    if (piece.b < 0) return false;
    block.request = attention::find_request(a, piece.b, piece.nodes, piece.prefix);
    block.keys = {piece.begin * kKeys, min(piece.end * kKeys, block.request.length)};
    block.place = piece.place;
  } else {
    block.request = attention::read_request(a, number / a.splits);
    block.keys = attention::split_keys(a, block.request.length, number % a.splits);
    block.place = a.splits > 1 ? number : -1;
  }
  block.steps = (block.keys.end - block.keys.begin + kKeys - 1) / kKeys;
  block.plain = max(0, block.request.prefix + 1 - block.keys.begin) / kKeys;
  block.plain = min(block.plain, block.steps);
  block.boxed = keys.box_rows > 0 ? block.plain : 0;
  return true;
}

// Lane 0's value.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

struct Shared {
  alignas(1024) unsigned char q[kTileBytes];
  alignas(1024) unsigned char keys[2][kTileBytes];
  alignas(1024) unsigned char probabilities[kPanelBytes];  // rows by keys, of the latest key block
  uint64_t full[2][2], empty[2][2];                        // buffer, piece
  uint64_t shared_out[2];   // warpgroup's probabilities and maximum are there
  uint64_t summed;          // the sums are
  uint64_t tile_nodes;      // that any row of the tile sees
  uint64_t nodes[kRows];    // that a row sees
  float top[kRows];         // maximum in use as of the latest key block
  float sums[2][2][kRows];  // warpgroup; exact, and as rounded to T
};
static_assert(sizeof(Shared) <= 232448);

__device__ __forceinline__ float read_kv_scale(const Params &a) {
  return a.p.kv_scale_ptr != nullptr ? *a.p.kv_scale_ptr : a.p.kv_scale;
}

// Of the block's partial results: the first row.
__device__ __forceinline__ int64_t first_partial(const Params &a, const Block &block) {
  return int64_t(block.place) * a.rows + block.first_row;
}

// The results of an empty split, or of a padding request.
template <class T>
__device__ void write_nothing(const Params &a, const Block &block) {
  const int64_t row = block.request.b * a.rows + block.first_row;
  for (int i = threadIdx.x; i < block.rows; i += kThreads) {
    if (block.place >= 0)
      a.partial_lse[first_partial(a, block) + i] = -INFINITY;
    else if (a.p.lse != nullptr)
      a.p.lse[row + i] = -INFINITY;
  }
  if (block.place >= 0) return;
  uint4 *out = reinterpret_cast<uint4 *>(static_cast<T *>(a.p.out) + row * kLatent);
  for (int i = threadIdx.x; i < block.rows * (kLatent / 8); i += kThreads) out[i] = {};
}

// ---- producers

// The page of a position, or -1 where the table or the cache has none.
__device__ __forceinline__ int page_of(const Params &a, const Request &request, int position) {
  const void *entry = attention::entry_of(a, request, position);
  if (entry == nullptr) return -1;
  const int64_t page = a.entry_bytes == 4 ? *static_cast<const int32_t *>(entry)
                                          : *static_cast<const int64_t *>(entry);
  return page >= 0 && page < a.p.num_pages ? static_cast<int>(page) : -1;
}

__device__ __forceinline__ void wait_empty(Shared &shared, int step, int piece) {
  if (step >= 2) wait(shared.empty[step % 2][piece], step / 2 % 2 ^ 1);
}

// Whole boxes of pages, by one warp; each lane one page of a key block. Many tiles, which go
// through the same keys side by side, take turns in asking L2 for those of later steps.
__device__ __forceinline__ void copy_pages(const Params &a, const Keys &keys, const Block &block,
                                           Shared &shared, int steps, int lane) {
  constexpr int kAhead = 4;  // steps that pages are looked up before they are copied
  constexpr int kManyTiles = 4;
  const int pages = kKeys / keys.box_rows;
  if (lane >= pages) return;
  const unsigned lanes = (1u << pages) - 1;
  int position = block.keys.begin + lane * keys.box_rows;
  const auto look_up = [&](int step, int ahead) {
    return step < steps ? page_of(a, block.request, position + ahead * kKeys) : -1;
  };
  const auto group_in_page = [&](int ahead) {
    return ((position + ahead * kKeys) & (static_cast<int>(a.p.page_size) - 1)) / 8;
  };
  int ahead[kAhead + 1];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i + 1] = look_up(i, i);
  int turn = a.tiles >= kManyTiles ? static_cast<int>(blockIdx.x % a.tiles) : -1;
  for (int step = 0; step < steps; ++step, position += kKeys) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = ahead[i + 1];
    ahead[kAhead] = look_up(step + kAhead, kAhead);
    if (turn-- == 0) {
      turn = a.tiles - 1;
#pragma unroll
      for (int piece = 0; piece < 2; ++piece)
        prefetch_box(keys.pieces[piece], first_panel(piece), group_in_page(kAhead - 1),
                     ahead[kAhead - 1]);
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      uint64_t &full = shared.full[step % 2][piece];
      const unsigned char *to = shared.keys[step % 2] + piece_start(piece) +
                                lane * keys.box_rows * (piece_panels(piece) * 128);
      wait_empty(shared, step, piece);
      if (lane == 0) arrive_expecting(full, piece_panels(piece) * kPanelBytes);
      __syncwarp(lanes);
      copy_box(shared_address(to), keys.pieces[piece], first_panel(piece), group_in_page(0),
               ahead[0], full);
    }
  }
}

// A gathered piece is there, once its copies are where they still run.
__device__ __forceinline__ void publish_piece(Shared &shared, int step, int piece, int thread,
                                              bool copies) {
  uint64_t &full = shared.full[step % 2][piece];
  if (copies) attach_copies(full);
  sync_threads(kProducerBarrier, kProducers);
  if (thread == 0) arrive(full);
}

// Row by row, by all producers, eight threads a key; keys that no row of the tile sees, and those
// whose table entry is bad, become zeros. e4m3 keys arrive as 8 bytes in the first half of their
// 16-byte place and are widened there, exactly, by the thread that copied them.
template <class T, bool Fp8>
__device__ __forceinline__ void gather_keys(const Params &a, const Block &block, Shared &shared,
                                            int step, int thread) {
  constexpr int kAtOnce = kProducers / 8, kEach = kKeys / kAtOnce;
  constexpr int kChunk = Fp8 ? 8 : 16;  // bytes in the cache
  const int key = thread / 8;
  const uint64_t tile_nodes = shared.tile_nodes;
  const auto find = [&](int position) {
    if (position >= block.keys.end || !attention::sees(tile_nodes, position - block.request.prefix))
      return -1;
    return page_of(a, block.request, position);
  };
  // Where this thread's chunk of a key and panel goes.
  const auto place = [&](int buffer, int piece, int i, int panel) {
    const int groups = (key / 8 + i * (kAtOnce / 8)) * piece_panels(piece);
    return shared.keys[buffer] + piece_start(piece) + key % 8 * 128 + ((thread ^ key) & 7) * 16 +
           (groups + panel - first_panel(piece)) * (kPanelBytes / 8);
  };
  int position = block.keys.begin + step * kKeys + key;
  int next[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) next[i] = find(position + i * kAtOnce);
  for (; step < block.steps; ++step, position += kKeys) {
    const char *from[kEach];
    bool valid[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int in_page = (position + i * kAtOnce) & (static_cast<int>(a.p.page_size) - 1);
      valid[i] = next[i] >= 0;
      from[i] = static_cast<const char *>(a.p.kv_cache) + thread % 8 * kChunk;
      if (valid[i])
        from[i] += (next[i] * a.p.kv_stride_page + in_page * a.p.kv_stride_row) * (kChunk / 8);
    }
    if (step + 1 < block.steps) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) next[i] = find(position + kKeys + i * kAtOnce);
    }
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      wait_empty(shared, step, piece);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int panel = first_panel(piece); panel < first_panel(piece + 1); ++panel)
          copy_async<kChunk>(shared_address(place(step % 2, piece, i, panel)),
                             from[i] + panel * 8 * kChunk, valid[i]);
      }
      if (Fp8)
        commit_copies();
      else
        publish_piece(shared, step, piece, thread, true);
    }
#pragma unroll
    for (int piece = 0; Fp8 && piece < 2; ++piece) {
      piece == 0 ? wait_copies<1>() : wait_copies<0>();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int panel = first_panel(piece); panel < first_panel(piece + 1); ++panel) {
          unsigned char *chunk = place(step % 2, piece, i, panel);
          *reinterpret_cast<uint4 *>(chunk) =
              attention::widen<T>(*reinterpret_cast<const uint2 *>(chunk));
        }
      }
      publish_piece(shared, step, piece, thread, false);
    }
  }
}

template <class T>
__device__ __forceinline__ void produce(const Params &a, const Keys &keys, const Block &block,
                                        Shared &shared) {
  const int thread = threadIdx.x - kConsumers;
  if (thread < 32) {
    if (block.boxed > 0) copy_pages(a, keys, block, shared, block.boxed, thread);
    __syncwarp();
  }
  // tile_nodes is there; and nobody waits for a buffer before its turn.
  sync_threads(kReadyBarrier, kThreads);
  if (block.boxed == block.steps) return;
  if (a.p.kv_dtype == KDTREE_F8E4M3)
    gather_keys<T, true>(a, block, shared, block.boxed, thread);
  else
    gather_keys<T, false>(a, block, shared, block.boxed, thread);
}

// ---- consumers

// What each row sees, and what any row does; by one warp.
__device__ __forceinline__ void read_nodes(const Params &a, const Block &block, Shared &shared,
                                           int lane) {
  uint64_t all = 0;
  for (int i = lane; i < kRows; i += 32) {
    uint64_t nodes = 0;
    if (i < block.rows)
      nodes = attention::seen_nodes(a.p, block.request,
                                    (block.first_row + i) / static_cast<int>(a.p.heads));
    shared.nodes[i] = nodes;
    all |= nodes;
  }
  for (int step = 16; step > 0; step /= 2) all |= __shfl_xor_sync(~0u, all, step);
  if (lane == 0) shared.tile_nodes = all;
}

// q to shared memory, eight threads a row; rows past the end become zeros.
__device__ __forceinline__ void load_q(const Params &a, const Block &block, Shared &shared,
                                       int thread) {
  const kdtree_verify_attn_params &p = a.p;
  const int heads = static_cast<int>(p.heads);
#pragma unroll
  for (int i = thread / 8; i < kRows; i += kConsumers / 8) {
    const bool valid = i < block.rows;
    const int row = block.first_row + (valid ? i : 0);
    const int64_t b = block.request.b;
    const char *latent =
        static_cast<const char *>(p.q) +
        (b * p.q_stride_b + row / heads * p.q_stride_q + row % heads * p.q_stride_h) * 2 +
        thread % 8 * 16;
    const char *rope = latent + kLatent * 2;
    if (p.q_rope != nullptr)
      rope = static_cast<const char *>(p.q_rope) +
             (b * p.q_rope_stride_b + row / heads * p.q_rope_stride_q +
              row % heads * p.q_rope_stride_h) *
                 2 +
             thread % 8 * 16;
    const uint32_t to = shared_address(shared.q) + i * 128 + ((thread ^ i) & 7) * 16;
#pragma unroll
    for (int panel = 0; panel < kPanels - 1; ++panel)
      copy_async<16>(to + panel * kPanelBytes, latent + panel * 128, valid);
    copy_async<16>(to + (kPanels - 1) * kPanelBytes, rope, valid);
  }
}

// One warpgroup's part of the results. Lane 4g + t of warp w has rows 16w + g and 16w + g + 8
// (h = 0, 1), and of each 8 columns or keys n the elements 2t, 2t + 1: x[4n + 2h], x[4n + 2h + 1].
struct Results {
  float out[128] = {};
  float top[2] = {-INFINITY, -INFINITY};  // maximum in use
  float exact[2] = {}, rounded[2] = {};   // this lane's part of the sums
};

// Puts the sums on a new maximum; factor: what the output is to be multiplied by. Returns whether
// any row of the warp needs that.
__device__ __forceinline__ bool move_top(Results &r, const float (&top)[2], float (&factor)[2]) {
  bool any = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    any |= r.top[h] != top[h];
    factor[h] = top[h] == -INFINITY ? 1 : attention::exp2(r.top[h] - top[h]);
    r.top[h] = top[h];
    r.exact[h] *= factor[h], r.rounded[h] *= factor[h];
  }
  return __any_sync(~0u, any);
}

__device__ __forceinline__ void multiply_out(Results &r, const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < 64; ++n) {
    r.out[2 * n] *= factor[n % 2];
    r.out[2 * n + 1] *= factor[n % 2];
  }
}

// Waits for a piece of the key block that a buffer holds; turn: the buffer's how manieth.
__device__ __forceinline__ void wait_full(Shared &shared, int buffer, int piece, int turn,
                                          bool gathered) {
  wait(shared.full[buffer][piece], turn % 2);
  if (gathered) fence_async();
}

// scores = q keys, for one piece of the features.
template <class T, int Piece>
__device__ __forceinline__ void score(Shared &shared, int buffer, float (&s)[32]) {
  const uint32_t q = along_rows(shared_address(shared.q));
  const uint32_t k = along_rows(shared_address(shared.keys[buffer]) + piece_start(Piece));
  constexpr int kStride = piece_panels(Piece) * kTile;
  fence_products();
#pragma unroll
  for (int panel = first_panel(Piece); panel < first_panel(Piece + 1); ++panel) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t to_q = q + panel * (kPanelBytes / 16) + i * 2;
      const uint32_t to_k = k + (panel - first_panel(Piece)) * kTile + i * 2;
      if (panel == 0 && i == 0)
        multiply_scores<T, 0, kStride>(s, to_q, to_k);
      else
        multiply_scores<T, 1, kStride>(s, to_q, to_k);
    }
  }
  commit_products();
}

// Half the columns of a key block, as values: piece `Half` but for the rope part.
template <int Half>
__device__ __forceinline__ uint32_t values(const Shared &shared, int buffer) {
  return down_rows(shared_address(shared.keys[buffer]) + piece_start(Half));
}

// out += probabilities values, for 64 keys; the probabilities from registers,
template <class T, int Half>
__device__ __forceinline__ void add_values(Results &r, const Shared &shared, int buffer,
                                           const uint32_t (&p)[16]) {
  constexpr int kStride = piece_panels(Half) * kTile;
  const uint32_t v = values<Half>(shared, buffer);
  fence_products();
#pragma unroll
  for (int i = 0; i < 4; ++i) multiply_values<T, kStride>(r.out, p + 4 * i, v + i * 2 * kStride);
  commit_products();
}
// or as the other warpgroup left them.
template <class T, int Half>
__device__ __forceinline__ void add_values(Results &r, const Shared &shared, int buffer) {
  constexpr int kStride = piece_panels(Half) * kTile;
  const uint32_t v = values<Half>(shared, buffer);
  const uint32_t p = along_rows(shared_address(shared.probabilities));
  fence_products();
#pragma unroll
  for (int i = 0; i < 4; ++i) multiply_values<T, kStride>(r.out, p + i * 2, v + i * 2 * kStride);
  commit_products();
}

// Takes what a row does not see out of its scores. offset: of the first key from the root.
__device__ __forceinline__ void mask(const Shared &shared, int row, int offset, float (&s)[32]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint64_t nodes = shared.nodes[row + 8 * h];
    const int shift = threadIdx.x % 4 * 2;
    const uint32_t seen[2] = {(offset <= -32 ? ~0u : attention::sees32(nodes, offset)) >> shift,
                              attention::sees32(nodes, offset + 32) >> shift};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (!(seen[n / 4] >> (n % 4 * 8 + i) & 1)) s[4 * n + 2 * h + i] = -INFINITY;
    }
  }
}

// Of scores. Positive ones commute with the maximum and multiply inside the exponential.
struct Scale {
  float before, inside;
};

template <int N>
__device__ __forceinline__ void multiply_all(float (&x)[N], float factor) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= factor;
}

// The maximum to use from now on: at least the old one, at most kSlack below the true one.
__device__ __forceinline__ void find_top(const float (&s)[32], float scale, const float (&old)[2],
                                         float (&top)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = -INFINITY;
#pragma unroll
    for (int n = 0; n < 8; ++n) x = fmaxf(x, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2)) * scale;
    top[h] = x > old[h] + kSlack ? x : old[h];
  }
}

// Scores to probabilities, as operands of the next product.
template <class T>
__device__ __forceinline__ void exponentials(Results &r, const float (&s)[32], float scale,
                                             uint32_t (&p)[16]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float base = r.top[h] == -INFINITY ? 0 : r.top[h];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float low = attention::exp2(s[4 * n + 2 * h] * scale - base);
      const float high = attention::exp2(s[4 * n + 2 * h + 1] * scale - base);
      r.exact[h] += low + high;
      const uint32_t pair = pack<T>(low, high);
      const float2 rounded = unpack<T>(pair);
      r.rounded[h] += rounded.x + rounded.y;
      p[2 * n + h] = pair;
    }
  }
}

// Leaves probabilities and maximum for the other warpgroup.
__device__ __forceinline__ void share(Shared &shared, int warpgroup, int row, const Results &r,
                                      const uint32_t (&p)[16]) {
  const int lane = threadIdx.x % 32;
  const int to = threadIdx.x % 128 / 32 * 16 + lane % 16;  // row of a matrix
  const uint32_t address = shared_address(shared.probabilities) + to * 128;
  // All of this warpgroup's products have read what was there before.
  sync_threads(warpgroup == 0 ? kLeftBarrier : kRightBarrier, 128);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_matrices(address + (((i * 2 + lane / 16) ^ to) & 7) * 16, p + 4 * i);
  if (lane % 4 == 0) shared.top[row] = r.top[0], shared.top[row + 8] = r.top[1];
  fence_async();
  arrive(shared.shared_out[warpgroup]);
}

__device__ __forceinline__ void release(Shared &shared, int buffer, int piece) {
  if (threadIdx.x % 32 == 0) arrive(shared.empty[buffer][piece]);
}

__device__ __forceinline__ void read_top(const Shared &shared, int row, float (&top)[2]) {
  top[0] = shared.top[row], top[1] = shared.top[row + 8];
}

// Warpgroup 0: scores of even key blocks, the left columns.
template <class T>
__device__ __forceinline__ void consume_left(const Block &block, Shared &shared, Scale scale,
                                             int row, Results &r) {
  float s[32];
  uint32_t p[16];
  // A block whose probabilities are warpgroup 1's.
  const auto add_odd = [&](int step) {
    wait_full(shared, 1, 0, step / 2, step >= block.boxed);
    wait(shared.shared_out[1], step / 2 % 2);
    float top[2];
    read_top(shared, row, top);
    float factor[2];
    if (move_top(r, top, factor)) {
      wait_products<0>();
      settle(r.out);
      multiply_out(r, factor);
    }
    add_values<T, 0>(r, shared, 1);
  };
  for (int step = 0; step < block.steps; step += 2) {
    const bool gathered = step >= block.boxed;
    wait_full(shared, 0, 0, step / 2, gathered);
    score<T, 0>(shared, 0, s);
    wait_full(shared, 0, 1, step / 2, gathered);
    score<T, 1>(shared, 0, s);
    if (step > 0) {
      add_odd(step - 1);
      wait_products<1>();
    } else {
      wait_products<0>();
    }
    settle(s);
    if (scale.before != 1) multiply_all(s, scale.before);
    if (step >= block.plain)
      mask(shared, row, block.keys.begin + step * kKeys - block.request.prefix, s);
    float top[2];
    find_top(s, scale.inside, r.top, top);
    float factor[2];
    const bool changed = move_top(r, top, factor);
    exponentials<T>(r, s, scale.inside, p);
    wait_products<0>();
    settle(r.out);
    if (step > 0) release(shared, 1, 0);
    share(shared, 0, row, r, p);
    if (changed) multiply_out(r, factor);
    add_values<T, 0>(r, shared, 0, p);
    wait_products<0>();
    settle(r.out);
    release(shared, 0, 0);
  }
  if (block.steps % 2 == 0) add_odd(block.steps - 1);
  wait_products<0>();
  settle(r.out);
}

// Warpgroup 1: scores of odd key blocks, the right columns.
template <class T>
__device__ __forceinline__ void consume_right(const Block &block, Shared &shared, Scale scale,
                                              int row, Results &r) {
  float s[32];
  uint32_t p[16];
  // A block whose probabilities are warpgroup 0's.
  const auto add_even = [&](int step) {
    wait_full(shared, 0, 1, step / 2, step >= block.boxed);
    wait(shared.shared_out[0], step / 2 % 2);
    float top[2];
    read_top(shared, row, top);
    float factor[2];
    if (move_top(r, top, factor)) {
      wait_products<0>();
      settle(r.out);
      multiply_out(r, factor);
    }
    add_values<T, 1>(r, shared, 0);
  };
  for (int step = 1; step < block.steps; step += 2) {
    add_even(step - 1);
    wait_products<1>();
    if (step > 1) release(shared, 1, 1);
    const bool gathered = step >= block.boxed;
    wait_full(shared, 1, 0, step / 2, gathered);
    score<T, 0>(shared, 1, s);
    wait_products<1>();
    release(shared, 0, 1);
    wait_full(shared, 1, 1, step / 2, gathered);
    score<T, 1>(shared, 1, s);
    wait_products<0>();
    settle(s);
    settle(r.out);
    if (scale.before != 1) multiply_all(s, scale.before);
    if (step >= block.plain)
      mask(shared, row, block.keys.begin + step * kKeys - block.request.prefix, s);
    float top[2];
    find_top(s, scale.inside, r.top, top);
    float factor[2];
    const bool changed = move_top(r, top, factor);
    exponentials<T>(r, s, scale.inside, p);
    share(shared, 1, row, r, p);
    if (changed) multiply_out(r, factor);
    add_values<T, 1>(r, shared, 1, p);
  }
  if (block.steps % 2 == 1) add_even(block.steps - 1);
  wait_products<0>();
  settle(r.out);
}

// This warpgroup's half of the output, divided by the sums, and the lse.
template <class T>
__device__ __forceinline__ void write_results(const Params &a, const Block &block, Shared &shared,
                                              int warpgroup, int row, Results &r) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      r.exact[h] += __shfl_xor_sync(~0u, r.exact[h], step);
      r.rounded[h] += __shfl_xor_sync(~0u, r.rounded[h], step);
    }
    if (lane % 4 == 0) {
      shared.sums[warpgroup][0][row + 8 * h] = r.exact[h];
      shared.sums[warpgroup][1][row + 8 * h] = r.rounded[h];
    }
  }
  arrive(shared.summed);
  wait(shared.summed, 0);
  const int64_t first = block.request.b * a.rows + block.first_row;  // of B * rows
  const int64_t partial_row = first_partial(a, block);
  const int column = warpgroup * 256 + lane % 4 * 2;
  const float kv_scale = read_kv_scale(a);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = row + 8 * h;
    if (i >= block.rows) continue;
    if (warpgroup == 0 && lane % 4 == 0) {
      const float sum = shared.sums[0][0][i] + shared.sums[1][0][i];
      if (block.place >= 0)
        a.partial_lse[partial_row + i] = r.top[h] + log2f(sum);
      else if (a.p.lse != nullptr)
        a.p.lse[first + i] = attention::natural_log(r.top[h], sum);
    }
    const float sum = shared.sums[0][1][i] + shared.sums[1][1][i];
    const float norm = sum > 0 ? kv_scale / sum : 0;
    float *partial = a.partial_out + (partial_row + i) * kLatent + column;
    T *result = static_cast<T *>(a.p.out) + (first + i) * kLatent + column;
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float low = r.out[4 * n + 2 * h] * norm, high = r.out[4 * n + 2 * h + 1] * norm;
      if (block.place >= 0)
        *reinterpret_cast<float2 *>(partial + n * 8) = {low, high};
      else
        *reinterpret_cast<uint32_t *>(result + n * 8) = pack<T>(low, high);
    }
  }
}

template <class T>
__device__ __forceinline__ void consume(const Params &a, const Block &block, Shared &shared,
                                        int warpgroup) {
  const int thread = threadIdx.x;
  load_q(a, block, shared, thread);
  if (thread < 32) read_nodes(a, block, shared, thread);
  commit_copies();
  wait_copies<0>();
  fence_async();
  sync_threads(kConsumerBarrier, kConsumers);
  arrive_threads(kReadyBarrier, kThreads);
  Scale scale{1, a.p.sm_scale * read_kv_scale(a) * 1.44269504088896341f};  // for base 2
  if (!(scale.inside > 0)) scale = {scale.inside, 1};
  const int row = thread % 128 / 32 * 16 + thread % 32 / 4;
  Results r;
  if (warpgroup == 0)
    consume_left<T>(block, shared, scale, row, r);
  else
    consume_right<T>(block, shared, scale, row, r);
  write_results<T>(a, block, shared, warpgroup, row, r);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ Params a, const __grid_constant__ Keys keys) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char attention_smem[];
  Shared &shared = *reinterpret_cast<Shared *>(attention_smem);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      init_barrier(shared.full[i / 2][i % 2], 1);
      init_barrier(shared.empty[i / 2][i % 2], 4);  // a warpgroup's warps
    }
    for (int i = 0; i < 2; ++i) init_barrier(shared.shared_out[i], 128);
    init_barrier(shared.summed, kConsumers);
    publish_barriers();
  }
  __syncthreads();
  if (a.parts > 0) wait_for_previous();  // the plan is there
  Block block;
  if (!read_block(a, keys, block)) return;
  if (block.steps == 0) return write_nothing<T>(a, block);
  // Lets the compiler know that warps do not diverge.
  const int warpgroup = uniform(threadIdx.x / 128);
  block.steps = uniform(block.steps);
  block.plain = uniform(block.plain);
  block.boxed = uniform(block.boxed);
  if (warpgroup == kConsumers / 128) {
    shrink_registers<40>();
    produce<T>(a, keys, block, shared);
  } else {
    grow_registers<232>();
    consume<T>(a, block, shared, warpgroup);
  }
#endif
}

// ---- host

using EncodeTiled = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                 const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder of tensor maps; the library does not link the driver.
static EncodeTiled find_encoder() {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
}

// The cache as the copy engine sees it, where it can: 16-bit, pages of 8 rows and more.
static Keys describe_keys(const kdtree_verify_attn_params &p) {
  static const EncodeTiled encode = find_encoder();
  Keys keys{};
  if (encode == nullptr || p.page_size < 8 || p.num_pages <= 0 || p.kv_dtype != p.q_dtype)
    return keys;
  const int box_rows = static_cast<int>(std::min<int64_t>(p.page_size, kKeys));
  const auto row = static_cast<cuuint64_t>(p.kv_stride_row) * 2;
  const auto page = static_cast<cuuint64_t>(p.kv_stride_page) * 2;
  const cuuint64_t sizes[5] = {64, 8, kPanels, static_cast<cuuint64_t>(p.page_size / 8),
                               static_cast<cuuint64_t>(p.num_pages)};
  const cuuint64_t strides[4] = {row, 128, row * 8, page};
  const cuuint32_t unit[5] = {1, 1, 1, 1, 1};
  for (int piece = 0; piece < 2; ++piece) {
    const cuuint32_t box[5] = {64, 8, static_cast<cuuint32_t>(piece_panels(piece)),
                               static_cast<cuuint32_t>(box_rows / 8), 1};
    const CUresult result =
        encode(&keys.pieces[piece],
               p.kv_dtype == KDTREE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
               5, const_cast<void *>(p.kv_cache), sizes, strides, box, unit,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) return keys;
  }
  keys.box_rows = box_rows;
  return keys;
}

void attention(const Params &a, Stream stream) {
  const auto kernel =
      a.p.q_dtype == KDTREE_BF16 ? attention_kernel<__nv_bfloat16> : attention_kernel<__half>;
  allow_smem(kernel, sizeof(Shared));
  const int64_t pieces = a.parts > 0 ? a.max_pieces : a.p.batch * a.splits;
  launch_early("verify_attn", kernel, dim3(pieces * a.tiles), dim3(kThreads), sizeof(Shared),
               stream, a.parts > 0, a, describe_keys(a.p));
}

}  // namespace kdtree::cuda::sm90
