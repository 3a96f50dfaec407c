// Requests of which some are live and the others padding, the spare rows of a captured graph: the
// live ones are shared out to all blocks.
#pragma once

#include "cuda/cluster.h"
#include "tree/group.h"

namespace kdtree::cuda {

struct Live {
  int all;  // how many
  int it;   // the one asked for, or -1
};

// All live ones of `batch` requests, and which is number `place` of them. By a warp.
template <class IsLive>
__device__ __forceinline__ Live find_live(uint32_t batch, int place, const IsLive &is_live) {
  constexpr int kLoads = 4;  // in flight, a lane
  const int lane = threadIdx.x % 32;
  uint32_t lower;  // lanes, read here: a register less in the caller
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
  Live found{0, -1};
#pragma unroll 1
  for (uint32_t first = 0; first < batch; first += 32 * kLoads) {
    bool live[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) live[i] = is_live(min(first + 32 * i + lane, batch - 1));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t begin = first + 32 * i;
      const uint32_t lanes = __ballot_sync(0xffffffffu, live[i] && begin + lane < batch);
      const bool before = __popc(lanes & lower) == place - found.all;
      const uint32_t it = __ballot_sync(0xffffffffu, before && (lanes >> lane & 1) != 0);
      if (it != 0) found.it = static_cast<int>(begin) + tree::lowest_lane(it);
      found.all += __popc(lanes);
    }
  }
  return found;
}

// What a team of blocks works on, of the `each` things that every request has.
struct Share {
  cluster::Team team;
  uint32_t live;   // things, of all live requests
  uint32_t place;  // of this team's among them: none where that is `live` or more
  int request;     // whose it is
};

// The largest teams of which there is one for each thing, or teams of one block, and their first
// things. By a warp.
template <class IsLive>
__device__ __forceinline__ Share share_out(uint32_t batch, int each, const IsLive &is_live) {
  Share share{{cluster::size()}, 0, static_cast<uint32_t>(cluster::id()), 0};
  Live found = find_live(batch, share.place / each, is_live);
  share.live = found.all * each;
  while (share.team.size > 1 && share.live > share.team.teams()) share.team.size /= 2;
  if (share.team.size < cluster::size()) {
    share.place = share.team.number();
    found = find_live(batch, share.place / each, is_live);
  }
  share.request = found.it;
  return share;
}

// body(request) for the padding requests: by the blocks that have nothing else to do, or all.
template <class IsLive, class Body>
__device__ __forceinline__ void for_padding(uint32_t batch, const Share &share,
                                            const IsLive &is_live, Body &&body) {
  const uint32_t teams = share.team.teams(), number = share.team.number();
  uint32_t b = blockIdx.x, blocks = gridDim.x;
  if (teams > share.live) {
    if (number < share.live) return;
    b = (number - share.live) * share.team.size + share.team.rank();
    blocks = (teams - share.live) * share.team.size;
  }
  for (; b < batch; b += blocks)
    if (!is_live(b)) body(b);
}

}  // namespace kdtree::cuda
