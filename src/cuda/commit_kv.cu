// commit_kv on CUDA: one block a (request, layer, slice of the row), all layers in one launch,
// their base pointers in the kernel's parameters.
//
// A block works out the moves of its request, reads the moving rows into shared memory and writes
// them out, a range of columns at a time: as wide as the moves at hand leave room for, which for
// the 1,152-byte rows of an MLA cache is the whole row up to 28 moves.
//
// Moves 2 x layers x accepted rows: 61 layers x 5 rows x 1,152 bytes a request are 0.7 MB, 11 MB at
// 16 requests, 5 us at 4.3 TB/s read and written. A few requests take one launch and four dependent
// round trips: accept_index, block_table, the read, the write.
#include <algorithm>

#include "cuda/launch.h"
#include "tree/moves.h"

namespace kdtree::cuda {

constexpr int kCommitThreads = 256;
constexpr int kCommitBytes = 32768;  // of rows in flight a block
constexpr int kSliceVectors = 256;   // columns of a row that a block takes
constexpr int kMaxLayers = 448;      // of one launch

struct CommitParams {
  kdtree_commit_kv_params op;
  void *layers[kMaxLayers];
};
static_assert(sizeof(CommitParams) <= 4096, "kernel parameters are limited to 4 KB");

struct CommitShared {
  alignas(16) unsigned char rows[kCommitBytes];
  tree::Move move[tree::kMaxQlen], live[tree::kMaxQlen];
  int num_live;
};

// Vector: the widest word that every row of every layer is a multiple of.
template <class Vector>
__global__ void __launch_bounds__(kCommitThreads)
    commit_kv_kernel(const __grid_constant__ CommitParams p) {
  __shared__ CommitShared s;
  const int64_t b = blockIdx.x;
  const int thread = threadIdx.x;

  if (thread == 0) s.num_live = 0;
  const int count = tree::count_moves(p.op, b);
  if (count == 0) return;
  if (thread < count) s.move[thread] = tree::accepted_move(p.op, b, thread);
  __syncthreads();
  if (thread < count && tree::is_live(s.move, count, thread))
    s.live[atomicAdd(&s.num_live, 1)] = s.move[thread];  // in any order: all is read first
  __syncthreads();
  const int rows = s.num_live;
  if (rows == 0) return;

  Vector *cache = static_cast<Vector *>(p.layers[blockIdx.y]);
  Vector *staged = reinterpret_cast<Vector *>(s.rows);
  const int64_t element_size = p.op.element_size;
  const int64_t row_vectors = p.op.row_elements * element_size / sizeof(Vector);
  const int64_t begin = int64_t(blockIdx.z) * kSliceVectors;
  const int slice = static_cast<int>(min(int64_t(kSliceVectors), row_vectors - begin));
  const int most = static_cast<int>(kCommitBytes / sizeof(Vector)) / rows;
  for (int first = 0; first < slice; first += most) {
    const int width = min(most, slice - first);
    for (int i = thread; i < rows * width; i += kCommitThreads) {
      const int64_t from = s.live[i / width].from * element_size / int64_t(sizeof(Vector));
      staged[i] = cache[from + begin + first + i % width];
    }
    __syncthreads();
    for (int i = thread; i < rows * width; i += kCommitThreads) {
      const int64_t to = s.live[i / width].to * element_size / int64_t(sizeof(Vector));
      cache[to + begin + first + i % width] = staged[i];
    }
    __syncthreads();
  }
}

template <class Vector>
void launch_commit(const kdtree_commit_kv_params &p, Stream stream) {
  const int64_t row_vectors = p.row_elements * p.element_size / sizeof(Vector);
  CommitParams params;
  params.op = p;
  for (int64_t first = 0; first < p.num_layers; first += kMaxLayers) {
    const int64_t layers = std::min<int64_t>(p.num_layers - first, kMaxLayers);
    std::copy_n(p.kv_caches + first, layers, params.layers);
    launch("commit_kv", commit_kv_kernel<Vector>,
           dim3(p.batch, layers, ceil_div(row_vectors, kSliceVectors)), dim3(kCommitThreads), 0,
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
