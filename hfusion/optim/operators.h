/* The operators of formulas, as hfusion/optim/native_kernels.py writes them in C. They round as torch's do, each on its
   own, and take float and double. */

#include <stdint.h>
#include <tgmath.h>

#define abs(a) fabs(a)
#define sign(a) ((__typeof__(a))(((a) > 0) - ((a) < 0)))
#define rsqrt(a) (1 / sqrt(a))
#define div(a, b) ((a) / (b))
/* One division for all elements of a member. */
#define div_by(a, b) ((a) * (1 / (b)))
/* A NaN on either side stays. */
#define maximum(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define minimum(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define where(condition, a, b) ((condition) ? (a) : (b))
/* a * b + c, rounded once as in torch's vectors. */
#if defined(__FMA__) || defined(__aarch64__)
#define fused(a, b, c) fma(a, b, c)
#else
#define fused(a, b, c) ((a) * (b) + (c))
#endif
#define add(x, y, alpha) fused(alpha, y, x)
#define addcmul(x, a, b, value) fused((value) * (a), b, x)
#define addcdiv(x, a, b, value) ((x) + (value) * (a) / (b))
/* From the nearer end. */
#define near(weight) (fabs(weight) < 0.5f)
#define lerp(a, b, weight) \
    fused(near(weight) ? (weight) : (weight) - 1, (b) - (a), near(weight) ? (a) : (b))
#define cast_like(a, like) ((__typeof__(like))(a))
#define to_double(a) ((double)(a))
