// verify_attn on the CPU: the rows (slot, head) of a request in blocks of 48, its prefix in splits.
//
// A (block, split) is one unit of work; it walks over its keys in tiles with a running maximum
// (attention/kernels.h). The tree's keys belong to the last split. Splits are a function of the
// request alone, and their parts are put together in order, so bits depend neither on threads nor
// on neighbours; kv_split has nothing to pin here.
//
// Work: 1,088 multiply-adds per row and key. 8 heads, 65 slots and a prefix of 2,048 are 1.2 G of
// them: 14 ms on two cores that do 16 a cycle at 2.6 GHz.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/attention/kernels.h"
#include "cpu/parallel.h"
#include "error.h"
#include "ops.h"
#include "tree/limits.h"

namespace kdtree::cpu {

namespace {

using attention::Block;
using attention::Kernels;
using attention::kKeys;
using attention::kLatent;
using attention::kRows;
using attention::Partial;
using attention::Scratch;
using Params = kdtree_verify_attn_params;

constexpr int64_t kSplit = 10 * kKeys;  // least keys of a split: half a millisecond of a full block
// Units that the splits of one request are worth, for the threads of a large machine.
constexpr int64_t kUnits = 256;
// Partials of split requests that are alive at once, 99 KB each.
constexpr int64_t kPartials = 512;

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

// The widest kernels that the machine runs; KDTREE_CPU_ISA may name narrower ones.
const Kernels &choose_kernels() {
  int widest = 2;
  const char *text = std::getenv("KDTREE_CPU_ISA");
  if (text != nullptr && *text != '\0') {
    const std::string name = text;
    widest = name == "baseline" ? 0 : name == "avx2" ? 1 : name == "avx512" ? 2 : -1;
    if (widest < 0)
      throw ValueError("KDTREE_CPU_ISA: expected baseline, avx2 or avx512, got \"" + name + "\"");
  }
#if defined(__x86_64__)
  const bool fma = __builtin_cpu_supports("fma");
  if (widest >= 2 && fma && __builtin_cpu_supports("avx512f")) return attention::avx512;
  if (widest >= 1 && fma && __builtin_cpu_supports("avx2")) return attention::avx2;
#endif
  return attention::baseline;
}

struct Request {
  int64_t b;
  int used;  // slots; 0: padding
  int64_t prefix;
  int64_t splits, split_length;  // the last split has the rest of the prefix and the tree
  int64_t first_unit;            // units in order of split, then block
  int64_t first_partial;         // of splits x blocks; none when there is one split
};

class VerifyAttn {
 public:
  explicit VerifyAttn(const Params &p)
      : p_(p),
        kernels_(choose_kernels()),
        rows_(p.qlen * p.heads),
        blocks_((rows_ + kRows - 1) / kRows),
        kv_scale_(p.kv_scale_ptr != nullptr ? *p.kv_scale_ptr : p.kv_scale),
        q_size_(2),
        kv_size_(p.kv_dtype == KDTREE_F8E4M3 ? 1 : 2) {
    while (int64_t(1) << page_shift_ < p.page_size) ++page_shift_;
  }

  void run() {
    // In waves of consecutive requests, so that memory has a bound.
    std::vector<Request> wave;
    for (int64_t b = 0; b < p_.batch;) {
      wave.clear();
      int64_t units = 0, partials = 0;
      for (; b < p_.batch; ++b) {
        Request r = plan(b);
        const int64_t more = r.splits > 1 ? r.splits * blocks_ : 0;
        if (more > 0 && partials > 0 && partials + more > kPartials) break;
        r.first_unit = units;
        r.first_partial = partials;
        units += r.splits * blocks_;
        partials += more;
        wave.push_back(r);
      }
      run(wave, units, partials);
    }
  }

 private:
  Request plan(int64_t b) const {
    Request r{};
    r.b = b;
    r.used = static_cast<int>(p_.num_nodes != nullptr ? tree::clamp_nodes(p_.num_nodes[b], p_.qlen)
                                                      : p_.qlen);
    r.prefix = r.used > 0 ? p_.prefix_lens[b] : 0;
    const int64_t most = std::max<int64_t>(1, kUnits / blocks_);
    const int64_t tiles = (r.prefix + kKeys * most - 1) / (kKeys * most);
    r.split_length = std::max(kSplit, tiles * kKeys);
    r.splits = std::max<int64_t>(1, (r.prefix + r.split_length - 1) / r.split_length);
    return r;
  }

  void run(const std::vector<Request> &wave, int64_t units, int64_t partials) const {
    const std::unique_ptr<Partial[]> parts(new Partial[partials]);  // not touched before its unit
    parallel_for(units, 1, [&](int64_t begin, int64_t end) {
      const std::unique_ptr<Scratch> scratch(new Scratch);
      const std::unique_ptr<Partial> own(new Partial);
      for (int64_t unit = begin; unit < end; ++unit) {
        const Request &r =
            *(std::upper_bound(wave.begin(), wave.end(), unit,
                               [](int64_t u, const Request &x) { return u < x.first_unit; }) -
              1);
        const int64_t split = (unit - r.first_unit) / blocks_;
        const int64_t block = (unit - r.first_unit) % blocks_;
        if (r.used == 0) {
          clear(r, block);
        } else if (r.splits > 1) {
          attend(r, split, block, *scratch, parts[r.first_partial + split * blocks_ + block]);
        } else {
          attend(r, split, block, *scratch, *own);
          finish(r, block, own.get());
        }
      }
    });
    if (partials == 0) return;
    parallel_for(static_cast<int64_t>(wave.size()) * blocks_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Request &r = wave[i / blocks_];
        if (r.splits > 1) finish(r, i % blocks_, &parts[r.first_partial + i % blocks_]);
      }
    });
  }

  int rows_in(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(kRows, rows_ - block * kRows));
  }
  // Of the first row of a block, among all rows of the batch.
  int64_t first_row(const Request &r, int64_t block) const { return r.b * rows_ + block * kRows; }
  uint16_t *out_row(int64_t row) const { return static_cast<uint16_t *>(p_.out) + row * kLatent; }

  void clear(const Request &r, int64_t block) const {
    const int64_t row = first_row(r, block);
    const int rows = rows_in(block);
    std::fill_n(out_row(row), rows * kLatent, uint16_t(0));
    if (p_.lse != nullptr) std::fill_n(p_.lse + row, rows, -std::numeric_limits<float>::infinity());
  }

  const char *key(const Request &r, int64_t position) const {
    int64_t page, row = 0;
    if (p_.block_table != nullptr) {
      page = p_.block_table[r.b * p_.block_table_stride_b + (position >> page_shift_)];
      row = position & (p_.page_size - 1);
    } else {
      page = tree::load_id(p_.kv_indices, p_.kv_indices_dtype, p_.kv_indptr[r.b] + position);
    }
    return static_cast<const char *>(p_.kv_cache) +
           (page * p_.kv_stride_page + row * p_.kv_stride_row) * kv_size_;
  }

  // The nodes that a slot sees.
  uint64_t visible(const Request &r, int slot) const {
    if (slot >= r.used) return 0;
    if (p_.visibility == nullptr) return tree::node_bits(slot + 1);
    return static_cast<uint64_t>(p_.visibility[r.b * p_.visibility_stride_b + slot]) &
           tree::node_bits(r.used);
  }

  void attend(const Request &r, int64_t split, int64_t block_index, Scratch &scratch,
              Partial &partial) const {
    Block block{};
    block.rows = rows_in(block_index);
    block.q_dtype = p_.q_dtype;
    block.kv_dtype = p_.kv_dtype;
    block.scale = static_cast<float>(kLog2e * p_.sm_scale * kv_scale_);
    block.scratch = &scratch;
    block.partial = &partial;

    const void *q_rows[kRows], *rope_rows[kRows];
    uint64_t nodes[kRows], any = 0;
    for (int i = 0; i < block.rows; ++i) {
      const int64_t row = block_index * kRows + i, slot = row / p_.heads, head = row % p_.heads;
      q_rows[i] = static_cast<const char *>(p_.q) +
                  (r.b * p_.q_stride_b + slot * p_.q_stride_q + head * p_.q_stride_h) * q_size_;
      if (p_.q_rope != nullptr)
        rope_rows[i] =
            static_cast<const char *>(p_.q_rope) +
            (r.b * p_.q_rope_stride_b + slot * p_.q_rope_stride_q + head * p_.q_rope_stride_h) *
                q_size_;
      nodes[i] = visible(r, static_cast<int>(slot));
      any |= nodes[i];
    }
    kernels_.begin(block, q_rows, p_.q_rope != nullptr ? rope_rows : nullptr);

    const void *keys[kKeys];
    uint64_t seen[kKeys];
    int count = 0;
    bool masked = false;
    const auto flush = [&] {
      if (count > 0) kernels_.attend(block, keys, count, masked ? seen : nullptr);
      count = 0;
      masked = false;
    };
    const auto add = [&](int64_t position, uint64_t seen_by) {
      keys[count] = key(r, position);
      seen[count] = seen_by;
      if (++count == kKeys) flush();
    };
    constexpr uint64_t kAll = ~uint64_t(0);
    const int64_t end = std::min(r.prefix, (split + 1) * r.split_length);
    for (int64_t position = split * r.split_length; position < end; ++position) add(position, kAll);
    if (split + 1 == r.splits) {
      add(r.prefix, kAll);  // the root
      for (int slot = 1; slot < r.used; ++slot) {
        if ((any & tree::slot_bit(slot)) == 0) continue;
        uint64_t seen_by = 0;
        for (int i = 0; i < block.rows; ++i)
          seen_by |= uint64_t((nodes[i] & tree::slot_bit(slot)) != 0) << i;
        masked = true;
        add(r.prefix + slot, seen_by);
      }
    }
    flush();
  }

  // The output rows of a block from its partials, which lie blocks_ apart.
  void finish(const Request &r, int64_t block, const Partial *parts) const {
    const float *outs[kUnits];
    float weights[kUnits];
    const int count = static_cast<int>(r.splits);
    for (int i = 0; i < rows_in(block); ++i) {
      const int64_t row = first_row(r, block) + i;
      float max = -std::numeric_limits<float>::infinity();
      for (int s = 0; s < count; ++s) max = std::max(max, parts[s * blocks_].max[i]);
      double sum = 0;
      for (int s = 0; s < count; ++s) {
        const Partial &part = parts[s * blocks_];
        sum += part.sum[i] * std::exp2(double(part.max[i]) - max);
      }
      for (int s = 0; s < count; ++s) {
        const Partial &part = parts[s * blocks_];
        outs[s] = part.out[i];
        weights[s] = static_cast<float>(std::exp2(double(part.max[i]) - max) / sum * kv_scale_);
      }
      kernels_.write(outs, weights, count, p_.q_dtype, out_row(row));
      if (p_.lse != nullptr) p_.lse[row] = static_cast<float>((max + std::log2(sum)) * kLn2);
    }
  }

  const Params &p_;
  const Kernels &kernels_;
  const int64_t rows_, blocks_;  // of a request
  const double kv_scale_;
  const int64_t q_size_, kv_size_;
  int page_shift_ = 0;
};

}  // namespace

void verify_attn(const kdtree_verify_attn_params &p) {
  VerifyAttn(p).run();
}

}  // namespace kdtree::cpu
