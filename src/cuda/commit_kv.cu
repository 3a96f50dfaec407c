// commit_kv on CUDA: all layers in one launch, their base pointers in the kernel's parameters. A
// request's work is a list of columns, each 16 bytes of a row in one layer. A thread has one
// column: it reads that of every row that moves, then writes them all, so nobody waits for anybody
// else. A block is 256 columns, and 5 blocks a multiprocessor hold 32 requests of 61 layers at
// once.
//
// The first warp of each block works out the moves of its request, in two memory round trips: the
// prefix, the count and accept_index, then block_table, 16 lanes for where rows come from and 16
// for where they go. Meanwhile every thread looks up its column. Up to 8 rows move through
// registers; more than that go through shared memory.
//
// Moves 2 x layers x rows x 1,152 bytes a request: 22.5 MB at 61 layers, 5 rows and 32 requests,
// 5.2 us at 4.3 TB/s. Measured on an H200, with an L2 full of somebody else's changed lines that
// must be written out first: 12.2 us, with moves that are known beforehand 11.3; a copy of as many
// bytes that lie together is 10.0, and an empty kernel 3.4.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "cuda/launch.h"
#include "tree/moves.h"

namespace kdtree::cuda {

constexpr int kCommitThreads = 256;
constexpr int kCommitRows = 8;  // of a column that fit in a thread's registers
// Of more rows than that, in flight a block: so that 5 blocks share a multiprocessor.
constexpr int kCommitBytes = kSmallShared ? 16384 : 32768;
constexpr int kMaxLayers = 448;    // of one launch
constexpr int kMaxBlocks = 65535;  // of one request

struct CommitParams {
  kdtree_commit_kv_params op;   // its strides in vectors
  uint32_t row_vectors, items;  // vectors of a row; of one row in every layer of the launch
  int page_shift;
  void *layers[kMaxLayers];
};
static_assert(sizeof(CommitParams) <= 4096, "kernel parameters are limited to 4 KB");

struct CommitShared {
  alignas(16) unsigned char rows[kCommitBytes];
  int64_t from[tree::kMaxQlen], to[tree::kMaxQlen];  // of two to the same row the later one wins
  int num_live;
};

// Where column `item` would lie in the first row of its layer.
template <class Vector>
__device__ __forceinline__ Vector *column(const CommitParams &p, uint32_t item) {
  return static_cast<Vector *>(p.layers[item / p.row_vectors]) + item % p.row_vectors;
}

// A copy that may finish later, where the hardware has one of this width.
template <class Vector>
__device__ __forceinline__ void copy_async(Vector *to, const Vector *from) {
  if constexpr (sizeof(Vector) >= 4)
    __pipeline_memcpy_async(to, from, sizeof(Vector));
  else
    *to = *from;
}

// Any number of rows, through a column of s.rows a thread: nobody else reads what it writes. Where
// the rows are many, fewer threads take part, each for several columns. A function of its own, so
// that the usual case is one piece of code.
template <class Vector>
__device__ __noinline__ void move_staged(const CommitParams &p, CommitShared &s) {
  constexpr int kSlots = kCommitBytes / sizeof(Vector);
  const int rows = s.num_live, thread = threadIdx.x, width = min(kCommitThreads, kSlots / rows);
  if (thread >= width) return;
  Vector *staged = reinterpret_cast<Vector *>(s.rows) + thread;
  for (int at = thread; at < kCommitThreads; at += width) {
    const uint32_t item = blockIdx.y * kCommitThreads + at;
    if (item >= p.items) return;
    Vector *cache = column<Vector>(p, item);
#pragma unroll 4
    for (int i = 0; i < rows; ++i) copy_async(staged + i * width, cache + s.from[i]);
    __pipeline_commit();
    __pipeline_wait_prior(0);
#pragma unroll 4
    for (int i = 0; i < rows; ++i) cache[s.to[i]] = staged[i * width];
  }
}

// Vector: the widest word that every row of every layer is a multiple of.
template <class Vector>
__global__ void __launch_bounds__(kCommitThreads, 5)
    commit_kv_kernel(const __grid_constant__ CommitParams p) {
  __shared__ CommitShared s;
  const int64_t b = blockIdx.x;
  const int thread = threadIdx.x, place = threadIdx.x % 16;  // of 16 moves
  const int32_t *slots = p.op.accept_index + b * p.op.accept_index_stride_b;
  const int last = static_cast<int>(p.op.qlen) - 1;
  int32_t slot = 0, accepted = 0, prefix = 0;
  if (thread < 32) {
    slot = slots[min(place, last)];
    accepted = p.op.accept_token_num[b];
    prefix = p.op.prefix_lens[b];
  }
  // Which entries of block_table are needed is not known yet: 8 KB of a row of it, 32 bytes each.
  if (blockIdx.y == 0 && thread * 8 < p.op.block_table_width)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.op.block_table + b * p.op.block_table_stride_b +
                                                  thread * 8));
  // While all that is on its way. The compiler is not to put this off, nor to wait for the prefix
  // first.
  const uint32_t item = blockIdx.y * kCommitThreads + thread;
  Vector *cache = item < p.items ? column<Vector>(p, item) : nullptr;
  asm volatile("" : "+r"(prefix) : "l"(cache));

  if (thread < 32) {
    const int count = tree::count_moves(p.op, accepted);
    int rows = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += 16) {
      const int i = first + place;
      if (thread >= 16)
        slot = i;
      else if (first > 0 && i < count)
        slot = slots[i];
      const int64_t row =
          i < count ? tree::slot_row(p.op, p.page_shift, b, prefix, slot) : int64_t(-1);
      const tree::Move move = {row, __shfl_down_sync(~0u, row, 16)};
      const uint32_t moving = __ballot_sync(~0u, tree::is_live(move, rows > 0)) & 0xffff;
      const uint32_t inside = __ballot_sync(~0u, tree::is_live(move, true)) & 0xffff;
      const uint32_t live = inside & (0u - (moving & (0u - moving)));  // from the first one on
      if (live >> thread & 1) {
        const int at = rows + __popc(live & ((1u << thread) - 1));
        s.from[at] = move.from;
        s.to[at] = move.to;
      }
      rows += __popc(live);
    }
    if (thread == 0) s.num_live = rows;
  }
  __syncthreads();
  const int rows = s.num_live;
  if (rows == 0) return;
  if (rows > kCommitRows) return move_staged<Vector>(p, s);
  if (cache == nullptr) return;
  Vector value[kCommitRows];
#pragma unroll
  for (int i = 0; i < kCommitRows; ++i)
    if (i < rows) value[i] = __ldcg(cache + s.from[i]);
#pragma unroll
  for (int i = 0; i < kCommitRows; ++i)
    if (i < rows) cache[s.to[i]] = value[i];
}

template <class Vector>
void launch_commit(const kdtree_commit_kv_params &p, Stream stream) {
  const auto vectors = [&](int64_t elements) {
    return elements * p.element_size / static_cast<int64_t>(sizeof(Vector));
  };
  CommitParams params;
  params.op = p;
  params.op.kv_stride_page = p.num_pages > 1 ? vectors(p.kv_stride_page) : 0;
  params.op.kv_stride_row = p.page_size > 1 ? vectors(p.kv_stride_row) : 0;
  if (p.cache_loc != nullptr) {
    params.op.prefix_lens = p.accept_token_num;  // read for nothing
    params.op.block_table_width = 0;
  }
  params.page_shift = tree::page_shift(p);
  params.row_vectors = static_cast<uint32_t>(vectors(p.row_elements));
  // Layers of one launch: at least one, since a row has no more than 2^23 elements.
  const int64_t most =
      std::min<int64_t>(kMaxLayers, int64_t(kMaxBlocks) * kCommitThreads / params.row_vectors);
  for (int64_t first = 0; first < p.num_layers; first += most) {
    const int64_t layers = std::min(p.num_layers - first, most);
    std::copy_n(p.kv_caches + first, layers, params.layers);
    params.items = static_cast<uint32_t>(layers * params.row_vectors);
    launch("commit_kv", commit_kv_kernel<Vector>,
           dim3(p.batch, ceil_div(params.items, kCommitThreads)), dim3(kCommitThreads), 0, stream,
           params);
  }
}

void commit_kv(const kdtree_commit_kv_params &p, Stream stream) {
  // Every address and size as bits: the lowest one set is how far they all are aligned.
  uint64_t bits = p.row_elements * p.element_size;
  if (p.num_pages > 1) bits |= p.kv_stride_page * p.element_size;
  if (p.page_size > 1) bits |= p.kv_stride_row * p.element_size;
  for (int64_t i = 0; i < p.num_layers; ++i) bits |= reinterpret_cast<uintptr_t>(p.kv_caches[i]);
  if (bits % 16 == 0) return launch_commit<uint4>(p, stream);
  if (bits % 8 == 0) return launch_commit<uint2>(p, stream);
  if (bits % 4 == 0) return launch_commit<uint32_t>(p, stream);
  if (bits % 2 == 0) return launch_commit<uint16_t>(p, stream);
  launch_commit<uint8_t>(p, stream);
}

}  // namespace kdtree::cuda
