// build_ddtree on CUDA: a block of four warps a request (src/tree/build.h is the body). All of them
// stage the log-probs that can matter, min(L, budget) rows of K, in shared memory as doubles, and
// write the tree, a slot a thread; in between one warp grows it, while the others clear the links
// and bring the ids that it may choose to L2.
//
// Growing is `budget` steps that depend on each other, so its time is that of a chain: the lane of
// the best entry stores what follows it and all lanes load that, two 64-bit comparisons, two votes,
// and three more loads and two additions for what follows next. Most of a step's 60 instructions
// are of one pipe, which takes two cycles for each; what is not part of the chain is done in its
// waits. Bytes, 12 KB in and 3.5 KB out a request at L 15, K 64, are nothing beside that: 1,000
// requests move 16 MB, 4 us at 4.3 TB/s.
//
// Measured on an H200, budget 64, with a cold L2: 10.8 us for one request and 11.0 for 64, of which
// an empty kernel is 3.5. In cycles at 1.98 GHz: 2,100 until the log-probs are there, 600 and 156 a
// step to grow, whatever the scores, and 1,200 to write (2,000 if the tree is deep).
#include "cuda/launch.h"
#include "tree/build.h"

namespace kdtree::cuda {

constexpr int kBuildThreads = 128;
static_assert(sizeof(tree::BuildScratch) + tree::kMaxTable * sizeof(double) <= 48 << 10);

// One row of ids on its way to L2.
__device__ __forceinline__ void prefetch_ids(const kdtree_build_ddtree_params &p, int64_t b,
                                             int row) {
  const int size = p.ids_dtype == KDTREE_I64 ? 8 : 4;
  const char *ids =
      static_cast<const char *>(p.ids) + (b * p.ids_stride_b + row * p.ids_stride_l) * size;
  for (int at = 0; at < p.k * size; at += 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(ids + at));
}

__global__ void __launch_bounds__(kBuildThreads)
    build_ddtree_kernel(const __grid_constant__ kdtree_build_ddtree_params p) {
  extern __shared__ tree::BuildScratch scratch[];  // one base address for both
  auto *table = reinterpret_cast<double *>(scratch + 1);
  const int64_t b = blockIdx.x;
  const tree::IdWords root_words(p.root_tokens, p.root_tokens_dtype, b);
  const int32_t prefix = p.prefix_lens[b];
  tree::BlockGroup<kBuildThreads> block;
  const bool positive = block.any(tree::stage_build(block, p, b, table));
  const int64_t root = root_words.value();  // not before: the log-probs were to be on their way
  // The same for all lanes, and known to be: no collective has to gather a warp first.
  const auto uniform = [](int value) { return __shfl_sync(0xffffffffu, value, 0); };
  const int warp = uniform(threadIdx.x / 32);
  if (root >= 0 && warp == 0) {
    tree::WarpGroup group;
    tree::build_nodes(group, p, table, uniform(positive), *scratch);
  } else if (root >= 0) {
    const int row = threadIdx.x - 32;
    tree::clear_links(row, kBuildThreads - 32, *scratch);
    if (row < tree::BuildTable(p).levels) prefetch_ids(p, b, row);
  }
  block.sync();
  tree::write_tree(block, p, b, root, prefix, *scratch);
}

void build_ddtree(const kdtree_build_ddtree_params &p, Stream stream) {
  launch("build_ddtree", build_ddtree_kernel, dim3(p.batch), dim3(kBuildThreads),
         sizeof(tree::BuildScratch) + tree::BuildTable(p).size * sizeof(double), stream, p);
}

}  // namespace kdtree::cuda
