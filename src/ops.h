// The two implementations of every op, called by src/capi after its checks.
// Both take params that are already valid and, for CUDA, with the device already current.
#pragma once

#include "kdtree.h"

namespace kdtree {

using Stream = void *;  // a cudaStream_t; this header is read by plain C++ too

namespace cpu {
void draft_topk(const kdtree_draft_topk_params &p);
void merge_topk(const kdtree_merge_topk_params &p);
void build_ddtree(const kdtree_build_ddtree_params &p);
void tree_links(const kdtree_tree_links_params &p);
void expand_mask(const kdtree_expand_mask_params &p);
void verify_attn(const kdtree_verify_attn_params &p);
void tree_accept(const kdtree_tree_accept_params &p);
void tree_accept_logits(const kdtree_tree_accept_logits_params &p);
void commit_kv(const kdtree_commit_kv_params &p);
}  // namespace cpu

namespace cuda {
void draft_topk(const kdtree_draft_topk_params &p, Stream stream);
void merge_topk(const kdtree_merge_topk_params &p, Stream stream);
void build_ddtree(const kdtree_build_ddtree_params &p, Stream stream);
void tree_links(const kdtree_tree_links_params &p, Stream stream);
void expand_mask(const kdtree_expand_mask_params &p, Stream stream);
void verify_attn(const kdtree_verify_attn_params &p, Stream stream);
void tree_accept(const kdtree_tree_accept_params &p, Stream stream);
void tree_accept_logits(const kdtree_tree_accept_logits_params &p, Stream stream);
void commit_kv(const kdtree_commit_kv_params &p, Stream stream);

// Bytes that verify_attn needs on the current device, for every length; `pinned`: with a kv_split.
int64_t verify_attn_workspace(int64_t batch, int64_t qlen, int64_t heads, bool pinned);
}  // namespace cuda

}  // namespace kdtree
