// verify_attn on sm_90, tiles of up to 16 rows: what 64-row tiles leave over.
//
// Products are transposed: scores are keys (64, on the rows of a product) by the tile's rows (8
// or 16, on its columns), the output is value columns by rows. So a key block takes 36 + 32
// products of 64 x 8 x 16, 16 cycles each to read keys: with the copies 1,660 cycles of shared
// memory, where a tile of 64 rows takes 2,368. It takes 1,600.
//
// Each warpgroup goes through every other key block by itself, all 512 columns, so that one's
// softmax runs under the other's products; at the end the two results become one. A key block's
// buffer is its own, and the producers of common.h bring it as they do for the others.
#pragma once

#include <cmath>

#include "cuda/attention/sm90/common.h"

namespace kdtree::cuda::sm90 {

// Lane 4g + t of warp w has the keys, and of each 64 columns those, numbered 16w + g + 8h (h = 0,
// 1), of rows 8j + 2t + i (i = 0, 1): x[4j + 2h + i], and what such a row has at y[2j + i].
template <int Rows>
struct FewResults {
  static constexpr int kOwn = Rows / 4;  // rows of a lane
  float out[kLatent / 64][Rows / 2] = {};
  float top[kOwn], exact[kOwn] = {}, rounded[kOwn] = {};
};

// Of a lane's rows, the one at y[own].
template <int Rows>
__device__ __forceinline__ int few_row(int own) {
  return own / 2 * 8 + threadIdx.x % 4 * 2 + own % 2;
}

// Over the keys of a warp, in every lane.
template <int N, class F>
__device__ __forceinline__ void reduce_keys(float (&x)[N], const F &both) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = both(x[i], __shfl_xor_sync(~0u, x[i], step));
  }
}

// As score, in two sums: products of one wait for each other.
template <class T, int Rows, int Piece>
__device__ __forceinline__ void score_few(Shared &shared, int buffer, int turn, bool gathered,
                                          float (&s)[2][Rows / 2]) {
  constexpr int kStride = piece_panels(Piece) * kTile;
  score_piece<Piece>(shared, buffer, turn, gathered, [&](int i, uint32_t to_q, uint32_t to_k) {
    if (Piece == nth_piece(0) && i < 2)
      multiply_few<T, Rows, 0, 0, kStride>(s[i % 2], to_k, to_q);
    else
      multiply_few<T, Rows, 1, 0, kStride>(s[i % 2], to_k, to_q);
  });
}

// out += values probabilities, for 64 keys and a piece of the columns. p: where probabilities are.
template <class T, int Rows, int Piece>
__device__ __forceinline__ void add_few_values(FewResults<Rows> &r, const Shared &shared,
                                               int buffer, uint32_t p) {
  constexpr int kStride = 2 * kTile;
  const uint32_t v = along_rows(shared_address(shared.keys[buffer]) + piece_start(Piece));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel)
      multiply_few<T, Rows, 1, 1, kStride>(r.out[first_panel(Piece) + panel],
                                           v + panel * kTile + i * 2 * kStride, p + i * 2);
  }
  commit_products();
}

// As raise_top, for the whole warpgroup. Afterwards all its warps are done with the probabilities
// of the step before.
template <int Rows>
__device__ __forceinline__ void raise_few_top(FewShared &few, int warpgroup,
                                              const float (&s)[Rows / 2], float scale,
                                              FewResults<Rows> &r) {
  constexpr int kOwn = Rows / 4;
  float x[kOwn];
  bool above = false;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    x[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]) * scale;
    above |= x[i] > r.top[i] + kSlack;
  }
  if (!any_thread(kWarpgroupBarrier + warpgroup, 128, above)) return;
  reduce_keys(x, [](float y, float z) { return fmaxf(y, z); });
  const int warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    if (threadIdx.x % 32 < 4) few.top[warpgroup][warp][few_row<Rows>(i)] = x[i];
  sync_threads(kWarpgroupBarrier + warpgroup, 128);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int row = few_row<Rows>(i);
#pragma unroll
    for (int w = 0; w < 4; ++w) x[i] = fmaxf(x[i], few.top[warpgroup][w][row]);
    if (!(x[i] > r.top[i] + kSlack)) continue;
    const float factor = attention::exp2(r.top[i] - x[i]);
    r.top[i] = x[i];
    r.exact[i] *= factor, r.rounded[i] *= factor;
#pragma unroll
    for (int c = 0; c < kLatent / 64; ++c) {
      r.out[c][i / 2 * 4 + i % 2] *= factor;
      r.out[c][i / 2 * 4 + 2 + i % 2] *= factor;
    }
  }
}

// The output of both warpgroups together, divided by the sums, and the lse: each leaves its own in
// the buffer that it has been through, columns of a row side by side.
template <class T, int Rows>
__device__ __forceinline__ void write_few_results(const Params &a, Shared &shared, int warpgroup,
                                                  FewResults<Rows> &r) {
  constexpr int kStride = kLatent + 4;  // floats; the lanes of a warp meet all banks
  const Block &block = shared.block;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const auto add = [](float x, float y) { return x + y; };
  reduce_keys(r.exact, add);
  reduce_keys(r.rounded, add);
  float *out = reinterpret_cast<float *>(shared.keys[warpgroup]);
#pragma unroll
  for (int i = 0; i < r.kOwn; ++i) {
    const int row = few_row<Rows>(i);
    if (lane < 4) {
      shared.few.sums[warpgroup][warp][0][row] = r.exact[i];
      shared.few.sums[warpgroup][warp][1][row] = r.rounded[i];
      if (warp == 0) shared.few.last_top[warpgroup][row] = r.top[i];
    }
#pragma unroll
    for (int c = 0; c < kLatent / 64; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        out[row * kStride + c * 64 + warp * 16 + h * 8 + lane / 4] =
            r.out[c][i / 2 * 4 + 2 * h + i % 2];
    }
  }
  arrive(shared.summed);
  wait(shared.summed, 0);
  const int64_t first = block.request.b * a.rows + block.first_row;  // of B * rows
  const int64_t partial_row = first_partial(a, block);
  const float kv_scale = read_kv_scale(a);
  for (int i = threadIdx.x; i < block.rows * (kLatent / 8); i += kConsumers) {
    const int row = i / (kLatent / 8), column = i % (kLatent / 8) * 8;
    const float tops[2] = {shared.few.last_top[0][row], shared.few.last_top[1][row]};
    const float top = fmaxf(tops[0], tops[1]);
    float exact = 0, rounded = 0, x[8] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = attention::exp2(tops[half] - (top == -INFINITY ? 0 : top));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        exact += factor * shared.few.sums[half][w][0][row];
        rounded += factor * shared.few.sums[half][w][1][row];
      }
      const float *from =
          reinterpret_cast<const float *>(shared.keys[half]) + row * kStride + column;
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] += factor * from[k];
    }
    const float norm = rounded > 0 ? kv_scale / rounded : 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] *= norm;
    if (block.place >= 0) {
      float4 *to =
          reinterpret_cast<float4 *>(a.partial_out + (partial_row + row) * kLatent + column);
      to[0] = {x[0], x[1], x[2], x[3]};
      to[1] = {x[4], x[5], x[6], x[7]};
    } else {
      *reinterpret_cast<uint4 *>(static_cast<T *>(a.p.out) + (first + row) * kLatent + column) = {
          pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
    }
    if (column > 0) continue;
    if (block.place >= 0)
      a.partial_lse[partial_row + row] = top + log2f(exact);
    else if (a.p.lse != nullptr)
      a.p.lse[first + row] = attention::natural_log(top, exact);
  }
}

template <class T, int Rows>
__device__ __forceinline__ void consume_few(const Params &a, const Loop &loop, Scale scale,
                                            int warpgroup, Shared &shared) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  unsigned char *probabilities = shared.few.probabilities[warpgroup];
  // Matrices are 8 rows by 8 keys: where this lane's row of one goes.
  const uint32_t store = shared_address(probabilities) + lane / 16 * 1024 + lane % 8 * 128 +
                         (((warp * 2 + lane / 8 % 2) ^ lane) & 7) * 16;
  const uint32_t load = along_rows(shared_address(probabilities));
  FewResults<Rows> r;
#pragma unroll
  for (float &top : r.top) top = -INFINITY;
  for (int step = warpgroup; step < loop.steps; step += 2) {
    const int turn = step / 2;
    const bool gathered = step >= loop.boxed;
    float s[Rows / 2], parts[2][Rows / 2];
    score_few<T, Rows, kRope>(shared, warpgroup, turn, gathered, parts);
    score_few<T, Rows, 0>(shared, warpgroup, turn, gathered, parts);
    score_few<T, Rows, 2>(shared, warpgroup, turn, gathered, parts);
    score_few<T, Rows, 1>(shared, warpgroup, turn, gathered, parts);
    score_few<T, Rows, 3>(shared, warpgroup, turn, gathered, parts);
    wait_products<0>();
    settle(parts[0]);
    settle(parts[1]);
    release(shared, warpgroup, kRope);
#pragma unroll
    for (int i = 0; i < Rows / 2; ++i) s[i] = (parts[0][i] + parts[1][i]) * scale.before;
    if (step >= loop.plain) {
#pragma unroll
      for (int i = 0; i < Rows / 2; ++i) {
        const int offset = loop.offset + step * kKeys + warp * 16 + lane / 4 + i / 2 % 2 * 8;
        const uint64_t nodes = shared.nodes[few_row<Rows>(i / 4 * 2 + i % 2)];
        if (offset > 0 && !(attention::sees32(nodes, offset) & 1)) s[i] = -INFINITY;
      }
    }
    raise_few_top<Rows>(shared.few, warpgroup, s, scale.inside, r);
    uint32_t p[Rows / 4];
#pragma unroll
    for (int i = 0; i < Rows / 4; ++i) {
      float pair[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int own = i / 2 * 2 + k;
        const float base = r.top[own] == -INFINITY ? 0 : r.top[own];
        pair[k] = attention::exp2(s[2 * i + k] * scale.inside - base);
        r.exact[own] += pair[k];
      }
      p[i] = pack<T>(pair[0], pair[1]);
      const float2 rounded = unpack<T>(p[i]);
      r.rounded[i / 2 * 2] += rounded.x, r.rounded[i / 2 * 2 + 1] += rounded.y;
    }
    store_transposed(store, p);
    fence_async();
    sync_threads(kWarpgroupBarrier + warpgroup, 128);
    fence_products();
    add_few_values<T, Rows, 0>(r, shared, warpgroup, load);
    add_few_values<T, Rows, 2>(r, shared, warpgroup, load);
    add_few_values<T, Rows, 1>(r, shared, warpgroup, load);
    add_few_values<T, Rows, 3>(r, shared, warpgroup, load);
    wait_products<3>();
    release(shared, warpgroup, 0);
    wait_products<2>();
    release(shared, warpgroup, 2);
    wait_products<1>();
    release(shared, warpgroup, 1);
    wait_products<0>();
    release(shared, warpgroup, 3);
#pragma unroll
    for (auto &out : r.out) settle(out);
  }
  write_few_results<T, Rows>(a, shared, warpgroup, r);
}

}  // namespace kdtree::cuda::sm90
