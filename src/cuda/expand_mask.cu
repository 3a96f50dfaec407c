// expand_mask on CUDA.
//
// The byte layouts are written as one flat array, in pieces of 16 bytes that lie aligned in memory,
// so that wide rows go out at the speed of a fill: FULL at a prefix of 100,000, Q 65 and 8 requests
// is 52 MB, 12 us at 4.3 TB/s. Every warp takes an equal span of it, whatever the requests' sizes
// are; where a span starts is found by summing the sizes of the requests before it, 256 at a time.
// A piece within a prefix is stored at once; one that holds tree columns, or crosses rows, is put
// together byte by byte.
//
// PACKED32 is a warp a request: Q x 8 bytes in and Q x 12 out.
#include <algorithm>

#include "cuda/launch.h"
#include "tree/mask.h"

namespace kdtree::cuda {

constexpr int kMaskWarps = 4;
constexpr int kPiece = 16;

// A place in the flat mask. Past the last request there is one endless row of zeros.
struct MaskCursor {
  int64_t b, prefix, column;
  int row;

  __device__ void enter(const kdtree_expand_mask_params &p, int64_t request) {
    b = request;
    row = 0;
    prefix = b < p.batch ? tree::mask_prefix(p, b) : int64_t(1) << 62;
  }
  __device__ void advance(const kdtree_expand_mask_params &p, int64_t bytes) {
    column += bytes;
    while (column >= prefix + p.qlen) {
      column -= prefix + p.qlen;
      if (++row == p.qlen) enter(p, b + 1);
    }
  }
};

// The request that byte `at` belongs to (batch when it is past the end) and the byte it starts at.
__device__ __forceinline__ void find_request(const kdtree_expand_mask_params &p, int64_t at,
                                             int64_t &request, int64_t &start) {
  const int lane = threadIdx.x & 31;
  request = start = 0;
  if (p.layout == KDTREE_MASK_QLEN) {
    request = min(at / (p.qlen * p.qlen), p.batch);
    start = request * p.qlen * p.qlen;
    return;
  }
  const auto size = [&](int64_t b) {
    return b < p.batch ? p.qlen * (tree::mask_prefix(p, b) + p.qlen) : 0;
  };
  constexpr int kAhead = 8;
  for (; request < p.batch; request += 32 * kAhead) {
    int64_t total = 0;
    for (int i = 0; i < kAhead; ++i) total += size(request + i * 32 + lane);
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    if (start + total > at) break;
    start += total;
  }
  for (; request < p.batch; request += 32) {
    const int64_t mine = size(request + lane);
    int64_t end = start + mine;  // inclusive scan
    for (int step = 1; step < 32; step *= 2) {
      const int64_t below = __shfl_up_sync(0xffffffffu, end - start, step);
      if (lane >= step) end += below;
    }
    const uint32_t beyond = __ballot_sync(0xffffffffu, end > at);
    if (beyond != 0) {
      const int found = tree::lowest_lane(beyond);
      request += found;
      start = __shfl_sync(0xffffffffu, end - mine, found);
      return;
    }
    start = __shfl_sync(0xffffffffu, end, 31);
  }
  request = p.batch;
}

__global__ void __launch_bounds__(kMaskWarps * 32)
    expand_bytes_kernel(const __grid_constant__ kdtree_expand_mask_params p, int64_t span) {
  // Piece i covers bytes [16 i - shift, 16 i - shift + 16) of out; a warp's span is in pieces.
  auto *out = static_cast<uint8_t *>(p.out);
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(out) % kPiece);
  const int lane = threadIdx.x & 31;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kMaskWarps + threadIdx.x / 32) * span;
  const int64_t begin = max(first * kPiece - shift, int64_t(0));
  const int64_t end = min((first + span) * kPiece - shift, p.out_numel);
  if (begin >= end) return;

  int64_t request, start;
  find_request(p, begin, request, start);
  int64_t at = (first + lane) * kPiece - shift;  // below 0 in the first piece of a shifted out
  MaskCursor cursor;
  cursor.enter(p, request);
  cursor.column = 0;
  cursor.advance(p, max(at, int64_t(0)) - start);

  for (; at < end; at += 32 * kPiece) {
    const bool whole = at >= 0 && at + kPiece <= end;
    const bool past = cursor.b >= p.batch;
    if (whole && (past || cursor.column + kPiece <= cursor.prefix + 1)) {
      const uint32_t four = past ? 0 : 0x01010101u;
      *reinterpret_cast<uint4 *>(out + at) = make_uint4(four, four, four, four);
      cursor.advance(p, 32 * kPiece);
      continue;
    }
    uint32_t word[kPiece / 4] = {};
    MaskCursor byte = cursor;
    uint64_t nodes = byte.b < p.batch ? tree::row_nodes(p, byte.b, byte.row) : 0;
    const int skipped = at < 0 ? static_cast<int>(-at) : 0;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if (i < skipped || byte.b >= p.batch) continue;
      const int64_t column = byte.column - byte.prefix;
      if (column <= 0 || tree::sees(nodes, static_cast<int>(column)))
        word[i / 4] |= 1u << (i % 4 * 8);
      byte.advance(p, 1);
      if (byte.column == 0 && byte.b < p.batch) nodes = tree::row_nodes(p, byte.b, byte.row);
    }
    if (whole) {
      *reinterpret_cast<uint4 *>(out + at) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
        if (i >= skipped && at + i < end) out[at + i] = word[i / 4] >> (i % 4 * 8) & 1;
    }
    cursor.advance(p, 32 * kPiece - skipped);
  }
}

__global__ void __launch_bounds__(kMaskWarps * 32)
    pack_mask_kernel(const __grid_constant__ kdtree_expand_mask_params p) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kMaskWarps + threadIdx.x / 32;
  if (b >= p.batch) return;
  tree::WarpGroup group;
  tree::pack_mask(group, p, b);
}

void expand_mask(const kdtree_expand_mask_params &p, Stream stream) {
  if (p.layout == KDTREE_MASK_PACKED32) {
    launch("expand_mask", pack_mask_kernel, dim3(ceil_div(p.batch, kMaskWarps)),
           dim3(kMaskWarps * 32), 0, stream, p);
    return;
  }
  // One wave of warps, or fewer where that leaves less than a piece a lane.
  const int64_t pieces = ceil_div(p.out_numel, kPiece) + 1;  // one more when out is not aligned
  const int64_t warps = std::min(ceil_div(pieces, 32), int64_t(num_sms()) * 32);
  const int64_t span = ceil_div(ceil_div(pieces, warps), 32) * 32;
  launch("expand_mask", expand_bytes_kernel, dim3(ceil_div(pieces, span * kMaskWarps)),
         dim3(kMaskWarps * 32), 0, stream, p, span);
}

}  // namespace kdtree::cuda
