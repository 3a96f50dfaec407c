// verify_attn on CUDA: cuts the call into row tiles and key splits, runs the attention kernel of
// the device's path, and merges the splits. attention/README.md has the whole picture.
#include "cuda/attention/kernels.h"
#include "cuda/attention/schedule.h"
#include "cuda/launch.h"

namespace kdtree::cuda {

static attention::Schedule schedule_for(int64_t batch, int64_t qlen, int64_t heads, bool pinned) {
  const int64_t rows = qlen * heads;
  return attention::schedule(batch, qlen, heads, pinned, sm80::tile_rows(rows),
                             sm80::blocks_per_sm(rows), num_sms());
}

int64_t verify_attn_workspace(int64_t batch, int64_t qlen, int64_t heads, bool pinned) {
  return schedule_for(batch, qlen, heads, pinned).workspace_bytes;
}

void verify_attn(const kdtree_verify_attn_params &p, Stream stream) {
  const attention::Schedule s = schedule_for(p.batch, p.qlen, p.heads, p.kv_split > 0);
  const int64_t blocks = p.batch * s.splits * s.tiles;
  if (blocks > INT32_MAX || p.batch * s.rows > INT32_MAX)
    throw ValueError("batch: expected fewer than 2^31 rows (batch * qlen * heads), got batch " +
                     std::to_string(p.batch));

  attention::Params a{p, s.rows, s.tiles, s.splits, 0, 4, nullptr, nullptr};
  if (p.block_table == nullptr && p.kv_indices_dtype == KDTREE_I64) a.entry_bytes = 8;
  while (int64_t(1) << a.page_shift < p.page_size) ++a.page_shift;
  a.partial_out = static_cast<float *>(p.workspace);
  a.partial_lse = a.partial_out + p.batch * s.splits * s.rows * attention::kLatent;
  // Few rows are bound by memory, which the portable kernel fills as well; it also widens e4m3.
  const bool wide = sm80::tile_rows(s.rows) == 64 && p.kv_dtype == p.q_dtype;
  if (current_path() == Path::sm90 && wide)
    sm90::attention(a, stream);
  else
    sm80::attention(a, stream);
  if (s.splits > 1) attention::combine(a, stream);
}

}  // namespace kdtree::cuda
