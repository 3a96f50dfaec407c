// plan: the pieces of keys that a batch is cut into, for kernels whose blocks take one piece each.
//
// Lines up the key blocks of all requests, kPieceBlocks of cost between two, and cuts the line into
// P equal parts, P so that the tiles of all parts fill the GPU once or twice, whatever is quicker;
// where a request is cut, its pieces become partial results. Long pieces come first, so that blocks
// that start late are short. A cut that would leave a piece of less than kPieceBlocks is left out.
//
// One block, a thread a request and then a thread a piece; a few microseconds, bound by latency.
#include <algorithm>

#include "cuda/attention/kernels.h"
#include "cuda/attention/schedule.h"
#include "cuda/launch.h"

namespace kdtree::cuda::attention {

constexpr int kLevels = 32;  // of piece lengths

// x / y, rounded down; exact for x < 2^53.
__device__ inline int64_t divide(int64_t x, int64_t y) {
  return static_cast<int64_t>(__ddiv_rd(static_cast<double>(x), static_cast<double>(y)));
}

// Sums over the threads up to this one.
__device__ inline int64_t scan(int64_t x, int64_t (&warp_sums)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto in_warp = [lane](int64_t v) {
    for (int step = 1; step < 32; step *= 2) {
      const int64_t before = __shfl_up_sync(~0u, v, step);
      if (lane >= step) v += before;
    }
    return v;
  };
  x = in_warp(x);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = in_warp(lane < blockDim.x / 32 ? warp_sums[lane] : 0);
  __syncthreads();
  return warp > 0 ? x + warp_sums[warp - 1] : x;
}

__global__ void __launch_bounds__(kMaxPlanned)
    plan_kernel(const __grid_constant__ Params a, int at_once) {
  struct Line {
    int64_t from;  // where the request begins
    int blocks, nodes, prefix;
    int first_cut;  // of the cuts 1..P-1: the first one inside
    int pieces_before, pieces, place;
  };
  __shared__ Line lines[kMaxPlanned];
  __shared__ struct {
    int b, begin, end, place, rank;
  } pieces[kMaxPlanned + kMaxParts];
  __shared__ int64_t warp_sums[32];
  __shared__ int levels[kLevels];
  let_next_start();
  const int b = threadIdx.x, batch = static_cast<int>(a.p.batch);
  if (b < kLevels) levels[b] = 0;

  Line line{};
  if (b < batch) {
    const Request request = read_request(a, b);
    line.blocks = (request.length + 63) / 64;
    line.nodes = request.nodes, line.prefix = request.prefix;
  }
  const int64_t cost = b < batch ? line.blocks + kPieceBlocks : 0;
  const int64_t upto = scan(cost, warp_sums), total = warp_sums[blockDim.x / 32 - 1];
  line.from = upto - cost;
  int64_t parts = 1;
  double best = INFINITY;
  for (int waves = 1; waves <= 2; ++waves) {
    const int64_t p = max(int64_t(1), min(int64_t(min(int(waves * at_once / a.load), a.parts)),
                                          total / (2 * kPieceBlocks)));
    const double time = waves * (double(total) / p + kPieceBlocks);
    if (time < best) best = time, parts = p;
  }

  // Cut k is at total * k / parts, rounded down.
  const auto cut_at = [&](int64_t k) { return divide(total * k, parts); };
  const auto first_cut_from = [&](int64_t at) { return divide(at * parts + total - 1, total); };
  int cuts = 0;
  if (line.blocks >= 2 * kPieceBlocks) {
    line.first_cut = static_cast<int>(max(first_cut_from(line.from + kPieceBlocks), int64_t(1)));
    const int64_t end = min(first_cut_from(line.from + line.blocks - kPieceBlocks + 1), parts);
    cuts = static_cast<int>(max(end - line.first_cut, int64_t(0)));
  }
  // Pieces, partial results and requests with those, in one sum.
  const int64_t own = b >= batch ? 0 : cuts == 0 ? 1 : (cuts + 1) * (1 + (1 << 20)) + (1ll << 40);
  const int64_t numbers = scan(own, warp_sums);
  const int64_t all = warp_sums[blockDim.x / 32 - 1];
  const auto low = [](int64_t x) { return static_cast<int>(x & ((1 << 20) - 1)); };
  const int count = low(all), merges = static_cast<int>(all >> 40);
  line.pieces_before = low(numbers - own);
  line.pieces = cuts + 1;
  line.place = cuts > 0 ? low((numbers - own) >> 20) : -1;
  if (b < batch) lines[b] = line;
  if (cuts > 0) a.merges[(numbers - own) >> 40] = {b, line.place, cuts + 1};
  for (int i = merges + b; i < a.max_merges; i += blockDim.x) a.merges[i] = {0, 0, 0};
  __syncthreads();

  const int64_t part = (total + parts - 1) / parts;
  const auto level_of = [&](int blocks) {
    return max(kLevels - 1 - static_cast<int>(divide(int64_t(kLevels) * blocks, part)), 0);
  };
  for (int i = b; i < count; i += blockDim.x) {
    int request = 0;
    for (int step = kMaxPlanned / 2; step > 0; step /= 2)
      if (request + step < batch && lines[request + step].pieces_before <= i) request += step;
    const Line &of = lines[request];
    const int number = i - of.pieces_before;  // of its pieces
    const int64_t cut = of.first_cut + number;
    const int begin = number > 0 ? static_cast<int>(cut_at(cut - 1) - of.from) : 0;
    const int end = number + 1 < of.pieces ? static_cast<int>(cut_at(cut) - of.from) : of.blocks;
    const int place = of.place >= 0 ? of.place + number : -1;
    pieces[i] = {request, begin, end, place, atomicAdd(&levels[level_of(end - begin)], 1)};
  }
  __syncthreads();
  if (b < kLevels) {
    const int own_level = levels[b];
    int before = own_level;
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, before, step);
      if (b >= step) before += x;
    }
    levels[b] = before - own_level;
  }
  __syncthreads();
  for (int i = b; i < a.max_pieces; i += blockDim.x) {
    if (i >= count) {
      a.pieces[i].b = -1;
      continue;
    }
    const auto &piece = pieces[i];
    const Line &of = lines[piece.b];
    a.pieces[levels[level_of(piece.end - piece.begin)] + piece.rank] = {
        piece.b, piece.begin, piece.end, piece.place, of.nodes, of.prefix};
  }
}

void plan(const Params &a, int at_once, Stream stream) {
  const int threads = std::max<int>(static_cast<int>(a.p.batch + 31) / 32 * 32, 128);
  launch("verify_attn plan", plan_kernel, dim3(1), dim3(threads), 0, stream, a, at_once);
}

}  // namespace kdtree::cuda::attention
