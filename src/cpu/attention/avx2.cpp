// Eight lanes. Compiled with -mavx2 -mfma; run only where the CPU has both.
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__)
#error "this file needs -mavx2 -mfma"
#endif
#define KDTREE_KERNELS avx2
#define KDTREE_LANES 8
#define KDTREE_SCORE_VECTORS 2
#define KDTREE_SCORE_KEYS 6
#define KDTREE_VALUE_ROWS 6
#define KDTREE_VALUE_VECTORS 2
#include "cpu/attention/kernels.inc.h"
#endif
