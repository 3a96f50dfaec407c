// Four lanes: SSE2 or NEON, what every 64-bit machine has.
#define KDTREE_KERNELS baseline
#define KDTREE_LANES 4
#define KDTREE_SCORE_VECTORS 2
#define KDTREE_SCORE_KEYS 4
#define KDTREE_VALUE_ROWS 4
#define KDTREE_VALUE_VECTORS 2
#include "cpu/attention/kernels.inc.h"
