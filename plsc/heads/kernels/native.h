/* The interface between plsc/heads/kernels/__init__.py and the library.
 *
 * Notation of docs/life_of_a_step.md and plsc/heads/softmax.py: B samples, D embedding size, n selected class
 * weights (rows). All arrays are contiguous. Increase PLSC_ABI whenever a structure or function here changes.
 */
#ifndef PLSC_NATIVE_H
#define PLSC_NATIVE_H

#include <stdint.h>

#define PLSC_ABI 4
#define PLSC_API __attribute__((visibility("default")))

/* Instruction sets, in the order of ENGINES of plsc/heads/softmax.py. The first two multiply bfloat16. */
enum plsc_engine { PLSC_AMX, PLSC_AVX512_BF16, PLSC_AVX512, PLSC_AVX2, PLSC_NEON, PLSC_ENGINES };

enum plsc_status { PLSC_OK = 0, PLSC_NO_MEMORY = 1, PLSC_NO_ENGINE = 2 };

enum plsc_rule_kind { PLSC_NO_RULE = 0, PLSC_SGD = 1, PLSC_ADAMW = 2, PLSC_ADAGRAD = 3 };

struct plsc_rows {
  void *weight;            /* [rows, D], float or bfloat16; or D codes of 8 bits and their float scale */
  const float *bias;       /* one per row of weight, or NULL */
  const int64_t *position; /* [n] indices of the selected rows in weight; NULL: 0..n-1 */
  const int64_t *number;   /* [n] their global indices minus first_row; NULL: 0..n-1 */
  int64_t count;           /* n, a multiple of centers */
  int64_t dimension;       /* D */
  int64_t centers;         /* K */
  int64_t first_row;
  int32_t is_bf16;
  int32_t is_coded;
  int32_t cosine;
};

struct plsc_queries {
  const float *unit;       /* [B, D] */
  const int64_t *target;   /* [B] index among the selected classes, or -1 */
  const float *threshold;  /* [B] or NULL */
  int64_t count;           /* B */
  float scale;
  float hard_factor;
};

struct plsc_gradient {
  const float *log_total;          /* [B] */
  const float *weight;             /* [B] */
  const int64_t *target_row;       /* [B] index among the selected rows, or -1 */
  const float *target_coefficient; /* [B] */
  const float *shift;              /* [B], used with kept */
  const uint16_t *kept;            /* [panels, n, 16], or NULL */
  float factor;
};

struct plsc_rule {
  int32_t kind;
  int32_t nesterov;
  double lr, momentum, weight_decay, beta1, beta2, eps;
  uint32_t key;       /* of the class weights; the states use key + 1, key + 2 */
  int32_t state_is_bf16[2];
  void *state[2];     /* as in plsc/heads/weights.py */
  int32_t *steps;     /* adamw */
};

/* How to execute a call. */
struct plsc_run {
  int32_t engine;
  int32_t threads;
};

PLSC_API int32_t plsc_abi(void);

/* Returns whether the library, the CPU and the operating system support an engine. */
PLSC_API int32_t plsc_supports(int32_t engine);

/* Whether the CPU and the operating system have its instructions. */
PLSC_API int32_t plsc_has_instructions(int32_t engine);

/* Forward. fixed: shift [B] is an input; otherwise it is an output, the running maximum.
 * total [B]; weighted [B, D] or NULL; kept [2 ceil(B / 32), n, 16] bfloat16 or NULL (only if fixed). */
PLSC_API int32_t plsc_forward(const struct plsc_rows *, const struct plsc_queries *,
                              const struct plsc_run *, int32_t fixed, float *shift, float *total,
                              float *weighted, uint16_t *kept);

/* Update of the selected rows [begin, end). Updates class weights and states in place; with kind PLSC_NO_RULE
 * writes the gradients to out [end - begin, D] instead. bias_out [end - begin] or NULL. */
PLSC_API int32_t plsc_update(const struct plsc_rows *, const struct plsc_queries *,
                             const struct plsc_gradient *, const struct plsc_rule *,
                             const struct plsc_run *, int64_t begin, int64_t end, float *out,
                             float *bias_out);

#endif
