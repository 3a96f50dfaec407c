// A block on sm_90: what it works on, its shared memory, and the warpgroup that brings keys into
// two buffers, each of its warps a piece of them. The two that multiply are attention.cu's and, for
// tiles of few rows, few_rows.h's.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/numeric.h"
#include "cuda/attention/sm90/instructions.h"
#include "cuda/launch.h"

namespace kdtree::cuda::sm90 {

using attention::first_partial;
using attention::kDim;
using attention::kLatent;
using attention::pack;
using attention::Params;
using attention::read_kv_scale;
using attention::Request;
using attention::unpack;

constexpr int kRows = 64;
constexpr int kKeys = 64;           // of a key block
constexpr int kPanels = kDim / 64;  // of 64 features: 128 bytes of a row
constexpr int kPanelBytes = 64 * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kPagesAhead = 4;  // key blocks whose table entries are there or on their way
constexpr int kConsumers = 256;
constexpr int kProducers = 128;
constexpr int kThreads = kConsumers + kProducers;
// A key block comes and goes in pieces: its values in pieces of two panels, two for each warpgroup,
// and the rope panel. A piece is 8 keys by its panels, then the next 8 keys: so the copy engine
// leaves it, a whole page at a time.
constexpr int kPieces = 5, kRope = 4;
__host__ __device__ constexpr int first_panel(int piece) {
  return 2 * piece;
}
__host__ __device__ constexpr int piece_panels(int piece) {
  return piece == kRope ? 1 : 2;
}
__host__ __device__ constexpr int piece_start(int piece) {
  return first_panel(piece) * kPanelBytes;
}
// The order in which pieces come free, are brought, and are multiplied by q.
__host__ __device__ constexpr int nth_piece(int i) {
  return i == 0 ? kRope : i == 1 ? 0 : i == 2 ? 2 : i == 3 ? 1 : 3;
}
// A maximum that grows by less than this (in log2) leaves the old one in use: probabilities stay
// below 2^8, and the output is seldom rescaled.
constexpr float kSlack = 8;

enum Barrier {
  kConsumerBarrier = 1,
  kProducerBarrier,
  kWarpgroupBarrier,  // of warpgroup 0; the next number is warpgroup 1's
};

struct Keys {
  CUtensorMap values, rope;  // boxes of a piece: [page, 8 keys, panel, key, 64 features]
  int box_rows;              // min(page_size, 64), or 0 where the copy engine is not used
};

struct Block : attention::Work {
  int steps;  // key blocks; from `plain` on they hold positions of the tree or past the end
  int plain;
  int boxed;  // steps that the copy engine brings; the others are gathered
};

// Returns whether there is anything to do.
__device__ __forceinline__ bool read_block(const Params &a, const Keys &keys, Block &block) {
  if (!attention::find_work(a, kRows, block)) return false;
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

// What the loop over key blocks needs of it.
struct Loop {
  int steps, plain, boxed;
  int offset;  // of the first key from the root
};

// By warpgroup, of a tile of few rows.
struct FewShared {
  alignas(1024) unsigned char probabilities[2][kFewRows * 128];  // rows by keys
  float top[2][4][kFewRows];      // the largest score of a warp's keys
  float sums[2][4][2][kFewRows];  // of a warp's keys; exact, and as rounded to T
  float last_top[2][kFewRows];    // maximum in use at the end
};

struct Shared {
  alignas(1024) unsigned char q[kTileBytes];
  alignas(1024) unsigned char keys[2][kTileBytes];
  union {
    // Rows by keys, of the latest key block.
    alignas(1024) unsigned char probabilities[kPanelBytes];
    FewShared few;
  };
  uint64_t full[2][kPieces], empty[2][kPieces];  // by buffer
  uint64_t shared_out[2][4];                     // a warp's probabilities and maxima are there
  uint64_t ready;                                // q, nodes and block are
  uint64_t scored;                               // the scores of an odd key block are under way
  uint64_t summed;                               // the sums are
  uint64_t tile_nodes;                           // that any row of the tile sees
  uint64_t nodes[kRows];                         // that a row sees
  Block block;                                   // for the gathered keys and the results
  int pages[kProducers / 32][kPagesAhead][8];    // table entries: warp, step, lane
  float top[kRows];                              // maximum in use as of the latest key block
  float sums[2][2][kRows];                       // warpgroup; exact, and as rounded to T
};
static_assert(sizeof(Shared) <= 232448);

// ---- producers

__device__ __forceinline__ void wait_empty(Shared &shared, int step, int piece) {
  if (step >= 2) wait(shared.empty[step % 2][piece], step / 2 % 2 ^ 1);
}

// Whole boxes of pages: a piece of the values by each warp, and the rope panel by the last one;
// each lane one page of a key block. Many tiles, which go through the same keys side by side, take
// turns in asking L2 for those of later steps.
__device__ __forceinline__ void copy_pages(const Params &a, const Keys &keys, const Block &block,
                                           Shared &shared, int warp, int lane) {
  constexpr int kManyTiles = 4;
  const int pages = kKeys / keys.box_rows;
  if (lane >= pages) return;
  const unsigned lanes = (1u << pages) - 1;
  const int first = block.keys.begin + lane * keys.box_rows;
  // Entries of the table come through shared memory, so that no instruction waits for them. One
  // that is outside the cache is outside the tensor too, and reads zeros.
  const auto entry = [&](int step) -> int & {
    return shared.pages[warp][step % kPagesAhead][lane];
  };
  const auto look_up = [&](int step) {
    const void *from =
        step < block.boxed ? attention::entry_of(a, block.request, first + step * kKeys) : nullptr;
    if (from != nullptr)
      copy_async<4>(shared_address(&entry(step)), from, true);
    else
      entry(step) = -1;
    commit_copies();
  };
  const auto group_in_page = [&](int step) {
    return ((first + step * kKeys) & (static_cast<int>(a.p.page_size) - 1)) / 8;
  };
  const auto map = [&](int piece) -> const CUtensorMap & {
    return piece == kRope ? keys.rope : keys.values;
  };
  const auto copy = [&](int step, int piece) {
    uint64_t &full = shared.full[step % 2][piece];
    const unsigned char *to = shared.keys[step % 2] + piece_start(piece) +
                              lane * keys.box_rows * (piece_panels(piece) * 128);
    wait_empty(shared, step, piece);
    if (lane == 0) {
      arrive(full, kProducers / 32 - 1);
      arrive_expecting(full, piece_panels(piece) * kPanelBytes);
    }
    __syncwarp(lanes);
    copy_box(shared_address(to), map(piece), first_panel(piece), group_in_page(step), entry(step),
             full);
  };
  for (int step = 0; step < kPagesAhead - 1; ++step) look_up(step);
  const int turns = block.rows == a.few_rows ? 1 : a.tiles;  // few rows run ahead of the others
  int turn = a.tiles >= kManyTiles ? static_cast<int>(blockIdx.x % turns) : -1;
  for (int step = 0; step < block.boxed; ++step) {
    look_up(step + kPagesAhead - 1);
    wait_copies<1>();
    if (turn-- == 0) {
      turn = turns - 1;
      const int later = step + kPagesAhead - 2;
      const auto prefetch = [&](int piece) {
        prefetch_box(map(piece), first_panel(piece), group_in_page(later), entry(later));
      };
      prefetch(warp);
      if (warp == kPieces - 2) prefetch(kRope);
    }
    if (step == 1) wait(shared.ready, 0);  // q comes first
    if (warp == kPieces - 2) copy(step, kRope);
    copy(step, warp);
  }
}

// Row by row, by all producers, eight threads a key; keys that no row of the tile sees, and those
// whose table entry is bad, become zeros. e4m3 keys arrive as 8 bytes in the first half of their
// 16-byte place and are widened there, exactly, by the thread that copied them.
template <class T, bool Fp8>
__device__ __forceinline__ void gather_keys(const Params &a, Shared &shared, int thread) {
  constexpr int kAtOnce = kProducers / 8, kEach = kKeys / kAtOnce;
  constexpr int kChunk = Fp8 ? 8 : 16;  // bytes in the cache
  const Block &block = shared.block;
  const int key = thread / 8;
  // Of its group's keys, each of four threads looks up one. An entry of the table, in two words, is
  // not looked at before its turn, a step later, so that nothing waits for it.
  const int own = thread % kEach * kAtOnce + key;
  struct {
    int low, high;
  } entry;
  const auto look_up = [&](int step) {
    const int position = block.keys.begin + step * kKeys + own;
    entry.low = -1, entry.high = 0;
    if (position >= block.keys.end ||
        !attention::sees(shared.tile_nodes, position - block.request.prefix))
      return;
    const void *from = attention::entry_of(a, block.request, position);
    if (from == nullptr) return;
    entry.low = static_cast<const int *>(from)[0];
    if (a.entry_bytes == 8) entry.high = static_cast<const int *>(from)[1];
  };
  // Bytes to the key that was looked up, or -1 where the cache has no such page.
  const auto offset = [&](int step) -> int64_t {
    if (entry.high != 0 || entry.low < 0 || entry.low >= a.p.num_pages) return -1;
    const int in_page =
        (block.keys.begin + step * kKeys + own) & (static_cast<int>(a.p.page_size) - 1);
    return (entry.low * a.p.kv_stride_page + in_page * a.p.kv_stride_row) * (kChunk / 8);
  };
  // Where this thread's chunk of a key and panel goes.
  const auto place = [&](int buffer, int piece, int i, int panel) {
    const int groups = (key / 8 + i * (kAtOnce / 8)) * piece_panels(piece);
    return shared.keys[buffer] + piece_start(piece) + key % 8 * 128 + ((thread ^ key) & 7) * 16 +
           (groups + panel) * (kPanelBytes / 8);
  };
  // A warp's part of a piece is there.
  const auto publish = [&](int buffer, int piece, bool copies) {
    uint64_t &full = shared.full[buffer][piece];
    if (copies) attach_copies(full);
    __syncwarp();
    if (thread % 32 == 0) arrive(full);
  };
  look_up(block.boxed);
  for (int step = block.boxed; step < block.steps; ++step) {
    const int64_t own_offset = offset(step);
    look_up(step + 1);
    const char *from[kEach];
    bool valid[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t found = __shfl_sync(~0u, own_offset, thread % 32 / 8 * 8 + i);
      valid[i] = found >= 0;
      from[i] =
          static_cast<const char *>(a.p.kv_cache) + (valid[i] ? found : 0) + thread % 8 * kChunk;
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int piece = nth_piece(j);
      wait_empty(shared, step, piece);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int panel = 0; panel < piece_panels(piece); ++panel)
          copy_async<kChunk>(shared_address(place(step % 2, piece, i, panel)),
                             from[i] + (first_panel(piece) + panel) * 8 * kChunk, valid[i]);
      }
      if (Fp8)
        commit_copies();
      else
        publish(step % 2, piece, true);
    }
#pragma unroll
    for (int j = 0; Fp8 && j < kPieces; ++j) {
      const int piece = nth_piece(j);
      j == 0   ? wait_copies<4>()
      : j == 1 ? wait_copies<3>()
      : j == 2 ? wait_copies<2>()
      : j == 3 ? wait_copies<1>()
               : wait_copies<0>();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int panel = 0; panel < piece_panels(piece); ++panel) {
          unsigned char *chunk = place(step % 2, piece, i, panel);
          *reinterpret_cast<uint4 *>(chunk) =
              attention::widen<T>(*reinterpret_cast<const uint2 *>(chunk));
        }
      }
      publish(step % 2, piece, false);
    }
  }
}

template <class T, bool Fp8>
__device__ __forceinline__ void produce(const Params &a, const Keys &keys, const Block &block,
                                        Shared &shared) {
  const int thread = threadIdx.x - kConsumers;
  if (block.boxed > 0) copy_pages(a, keys, block, shared, uniform(thread / 32), thread % 32);
  __syncwarp();
  if (block.boxed == block.steps) return;
  sync_threads(kProducerBarrier, kProducers);  // nobody waits for a buffer before its turn
  wait(shared.ready, 0);
  gather_keys<T, Fp8>(a, shared, thread);
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
#pragma unroll 1  // a copy of this much code costs more than it saves
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

// Of scores. Positive ones commute with the maximum and multiply inside the exponential.
struct Scale {
  float before, inside;
};

__device__ __forceinline__ void release(Shared &shared, int buffer, int piece) {
  if (threadIdx.x % 32 == 0) arrive(shared.empty[buffer][piece]);
}

// The products of q and keys for a piece of the features, once that is there: multiply(i, to_q,
// to_k) for the i-th 16 of them. turn: how many key blocks the buffer has held before.
template <int Piece, class Multiply>
__device__ __forceinline__ void score_piece(Shared &shared, int buffer, int turn, bool gathered,
                                            const Multiply &multiply) {
  const uint32_t q = along_rows(shared_address(shared.q)) + first_panel(Piece) * (kPanelBytes / 16);
  const uint32_t k = along_rows(shared_address(shared.keys[buffer]) + piece_start(Piece));
  wait(shared.full[buffer][Piece], turn % 2);
  if (gathered) fence_async();
  fence_products();
#pragma unroll
  for (int panel = 0; panel < piece_panels(Piece); ++panel) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      multiply(panel * 4 + i, q + panel * (kPanelBytes / 16) + i * 2, k + panel * kTile + i * 2);
  }
  commit_products();
}

// What both warpgroups need before their first product.
__device__ __forceinline__ void prepare(const Params &a, const Block &block, Shared &shared) {
  const int thread = threadIdx.x;
  load_q(a, block, shared, thread);
  if (thread < 32) read_nodes(a, block, shared, thread);
  if (thread == 0) shared.block = block;
  commit_copies();
  wait_copies<0>();
  fence_async();
  sync_threads(kConsumerBarrier, kConsumers);
  arrive(shared.ready);
}

}  // namespace kdtree::cuda::sm90
