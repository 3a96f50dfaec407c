// commit_kv on CUDA: all layers in one launch, their base pointers in the kernel's parameters. A
// request's work is a list of columns, each 16 bytes of a row in one layer, and a thread takes one
// column at a time: it reads that column of every row that moves, then writes them all, so nobody
// waits for anybody else. A block is 256 columns, or a stride of such pieces once all blocks of a
// full GPU have one: half as many blocks as of 128, which start 0.4 us sooner.
//
// Every block works out the moves of its request for itself: accept_index, the prefix and the count
// in one memory round trip, block_table in a second one, for each slot whether it moves or not. The
// rows lie in shared memory while they move, 32 KB a block and up to 6 blocks a multiprocessor of
// sm_90 (2 where it has 100 KB): all bytes of a batch that fits are in flight at once.
//
// Moves 2 x layers x rows x 1,152 bytes a request: 27 MB at 61 layers, 6 rows and 32 requests,
// 6.3 us at 4.3 TB/s. Measured on an H200, 5 rows moving, with an L2 full of somebody else's
// changed lines: 13.5 us, of which an empty kernel is 3.3 and the round trips 4, as for one
// request.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "cuda/launch.h"
#include "tree/moves.h"

namespace kdtree::cuda {

constexpr int kCommitThreads = 256;
constexpr int kCommitBytes = 32768;    // of rows in flight a block
constexpr int kCommitBlocksPerSm = 6;  // of sm_90, by its shared memory
constexpr int kMaxLayers = 448;        // of one launch

struct CommitParams {
  kdtree_commit_kv_params op;
  uint32_t row_vectors, items;  // vectors of a row; of one row in every layer of the launch
  void *layers[kMaxLayers];
};
static_assert(sizeof(CommitParams) <= 4096, "kernel parameters are limited to 4 KB");

struct CommitShared {
  alignas(16) unsigned char rows[kCommitBytes];
  int64_t row_of[tree::kMaxQlen];  // element offset of each slot's row
  tree::Move move[tree::kMaxQlen], live[tree::kMaxQlen];
  int num_live;
};

// A copy that may finish later, where the hardware has one of this width.
template <class Vector>
__device__ __forceinline__ void copy_async(Vector *to, const Vector *from) {
  if constexpr (sizeof(Vector) >= 4)
    __pipeline_memcpy_async(to, from, sizeof(Vector));
  else
    *to = *from;
}

// Vector: the widest word that every row of every layer is a multiple of.
template <class Vector>
__global__ void __launch_bounds__(kCommitThreads)
    commit_kv_kernel(const __grid_constant__ CommitParams p) {
  __shared__ CommitShared s;
  const int64_t b = blockIdx.x;
  const int thread = threadIdx.x;
  const auto column = [&](uint32_t item) {  // of a layer
    return static_cast<Vector *>(p.layers[item / p.row_vectors]) + item % p.row_vectors;
  };
  uint32_t item = blockIdx.y * kCommitThreads + thread;
  Vector *cache = item < p.items ? column(item) : nullptr;

  // The moves of the request. Every load goes out before one is waited for.
  const bool is_slot = thread < p.op.qlen;
  const int32_t *slots = p.op.accept_index + b * p.op.accept_index_stride_b;
  const int32_t accepted = p.op.accept_token_num[b], root = slots[0];
  const int32_t slot = is_slot ? slots[thread] : -1;
  if (is_slot) s.row_of[thread] = tree::slot_row(p.op, b, thread);
  if (thread == 0) s.num_live = 0;
  __syncthreads();
  const int count = tree::count_moves(p.op, accepted);
  tree::Move move;
  if (thread < count)
    s.move[thread] = move =
        tree::accepted_move(p.op, root, slot, thread, [&](int slot) { return s.row_of[slot]; });
  __syncthreads();
  const auto vectors = [&](int64_t elements) {
    return static_cast<int64_t>(static_cast<uint64_t>(elements) * p.op.element_size /
                                sizeof(Vector));
  };
  if (thread < count && tree::is_live(s.move, count, thread))  // in any order: all is read first
    s.live[atomicAdd(&s.num_live, 1)] = {vectors(move.from), vectors(move.to)};
  __syncthreads();
  const int rows = s.num_live;
  if (rows == 0) return;

  // A thread has its column to itself, in registers' stead a column of s.rows: nobody else reads
  // what it writes. Where the rows are many, fewer threads take part, each for several columns.
  constexpr int kSlots = kCommitBytes / sizeof(Vector);
  const int width = min(kCommitThreads, kSlots / rows);
  Vector *staged = reinterpret_cast<Vector *>(s.rows) + thread;
  for (int at = thread; thread < width && item < p.items;) {
#pragma unroll 4
    for (int i = 0; i < rows; ++i) copy_async(staged + i * width, cache + s.live[i].from);
    __pipeline_commit();
    __pipeline_wait_prior(0);
#pragma unroll 4
    for (int i = 0; i < rows; ++i) cache[s.live[i].to] = staged[i * width];
    at += width, item += width;
    if (at >= kCommitThreads) {
      item += thread - at + gridDim.y * kCommitThreads;
      at = thread;
    }
    if (item < p.items) cache = column(item);
  }
}

template <class Vector>
void launch_commit(const kdtree_commit_kv_params &p, Stream stream) {
  CommitParams params;
  params.op = p;
  params.row_vectors = static_cast<uint32_t>(p.row_elements * p.element_size / sizeof(Vector));
  // Of one request: all blocks run at once, or it is one each.
  const int64_t wave = ceil_div(num_sms() * kCommitBlocksPerSm, p.batch);
  const int64_t most = std::min<int64_t>(kMaxLayers, INT32_MAX / 2 / params.row_vectors);
  for (int64_t first = 0; first < p.num_layers; first += most) {
    const int64_t layers = std::min(p.num_layers - first, most);
    std::copy_n(p.kv_caches + first, layers, params.layers);
    params.items = static_cast<uint32_t>(layers * params.row_vectors);
    const int64_t blocks = std::min(ceil_div(params.items, kCommitThreads), wave);
    launch("commit_kv", commit_kv_kernel<Vector>, dim3(p.batch, blocks), dim3(kCommitThreads), 0,
           stream, params);
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
