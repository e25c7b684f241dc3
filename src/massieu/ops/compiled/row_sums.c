/* Sums over the keys of a tile of attention scores, from which the moments of each query's attention follow.

   Each row is read twice while it lies in the first-level cache. Plain tensor operations read the whole tile about twenty
   times from the second-level cache. What the sums are is said in moment_blocks.py, and how they are called in row_sums.py. */

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* As many numbers as a register holds. Each lane has a sum of its own. The lanes are added after each block of keys, and the
   blocks in double precision, so that the sums of long rows lose no digits. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

enum { BLOCK = 1024 }; /* a multiple of 2·LANES */

typedef float numbers __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES))); /* of a comparison: −1 where it holds, else 0 */
typedef float quad __attribute__((vector_size(16)));

/* What a call asks for; the same numbers stand in row_sums.py. */
enum { EXPONENTIALS = 1, SQUARES = 2, WEIGHTS = 4, MASKED = 8, POSITION = 16 };
/* SQUARES: the spread and, with EXPONENTIALS, the sums of squares among these. */

/* The lowest number whose exp is still normal. A weight below it counts as this smallest weight. */
#define LOWEST (-87.0f)

/* The score of a hidden pair. */
#define HIDDEN (-__builtin_inff())

#define INLINE static inline __attribute__((always_inline))

INLINE numbers all(float value) { return value - (numbers){0}; }

/* What has several spellings: vectors of C have no maximum, and comparisons of AVX-512 are no vectors. */

/* The larger number in each lane; the other where one is not a number. */
INLINE numbers larger(numbers one, numbers other) {
#if defined(__AVX512F__)
  return (numbers)_mm512_max_ps((__m512)one, (__m512)other);
#elif defined(__AVX__)
  return (numbers)_mm256_max_ps((__m256)one, (__m256)other);
#elif defined(__SSE2__)
  return (numbers)_mm_max_ps((__m128)one, (__m128)other);
#else
  integers where = one > other;
  return (numbers)((where & (integers)one) | (~where & (integers)other));
#endif
}

/* one·other + third, rounded once where the processor can. It is spelled out, so that a sum is the same number whatever else is
   asked for: a compiler would choose place by place. */
INLINE numbers fused(numbers one, numbers other, numbers third) {
#if defined(__AVX512F__)
  return (numbers)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)third);
#elif defined(__FMA__)
  return (numbers)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)third);
#else
  return one * other + third;
#endif
}

/* A value where the pair of this score is not hidden, else 0. */
INLINE numbers if_visible(numbers score, numbers value) {
#if defined(__AVX512F__)
  return (numbers)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)score, (__m512)all(HIDDEN), _CMP_NEQ_UQ), (__m512)value);
#else
  return (numbers)((score != HIDDEN) & (integers)value);
#endif
}

/* Whether a score equals this one. */
INLINE int has(numbers scores, float score) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)scores, (__m512)all(score), _CMP_EQ_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)(scores == score)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)(scores == score)) != 0;
#else
  for (int lane = 0; lane < LANES; lane++)
    if (scores[lane] == score) return 1;
  return 0;
#endif
}

INLINE int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

/* The sum of the lanes, which begin again at 0. */
INLINE float taken(numbers *lanes) {
  quad parts[LANES / 4];
  memcpy(parts, lanes, sizeof parts);
  for (int part = 1; part < LANES / 4; part++) parts[0] += parts[part];
  *lanes = (numbers){0};
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

/* The largest of the lanes, none of which is NaN. */
INLINE float largest(numbers lanes) {
  float each[LANES];
  memcpy(each, &lanes, sizeof each);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++)
      if (each[lane + width] > each[lane]) each[lane] = each[lane + width];
  return each[0];
}

/* exp of numbers in [LOWEST, 0], with an error of at most two units in the last place: 2^n·exp(rest), where |rest| ≤ log(2)/2
   and exp(rest) is a polynomial of degree 7. Its pairs of terms do not wait for each other. NaN stays NaN. */
INLINE numbers exponential(numbers x) {
  /* 1.5·2²³: a sum with it is rounded to a whole number, which then stands in its low bits. */
  const numbers shift = all(12582912.0f);
  numbers shifted = fused(x, all(1.44269504088896341f), shift);
  numbers n = shifted - shift;
  /* log(2) in two parts, of which the first has few digits: n times it is exact. */
  numbers rest = fused(n, all(-0.693359375f), x);
  rest = fused(n, all(2.12194440e-4f), rest);
  numbers squared = rest * rest;
  numbers sum = fused(rest, all(1.0f / 5040.0f), all(1.0f / 720.0f));
  sum = fused(sum, squared, fused(rest, all(1.0f / 120.0f), all(1.0f / 24.0f)));
  sum = fused(sum, squared, fused(rest, all(1.0f / 6.0f), all(0.5f)));
  sum = fused(sum, squared, rest) + 1.0f;
  return (numbers)((integers)sum + ((integers)shifted << 23));
}

/* What the first reading of a row finds, in each lane. A sum that is NaN tells of a score that may be. */
typedef struct {
  numbers top, sum, count;
} First;

INLINE void read_first(First *so_far, numbers score, int masked) {
  so_far->top = larger(score, so_far->top);
  if (masked) {
    so_far->count += if_visible(score, all(1.0f));
    score = if_visible(score, score);
  }
  so_far->sum += score;
}

/* What the second reading adds up, in each lane. */
typedef struct {
  numbers spread, total, square, first, second;
} Second;

/* Add some keys. Returns their weights exp(score − top). */
INLINE numbers read_second(Second *so_far, numbers score, float top, float mean, int masked, int what) {
  numbers weight = {0};
  if (what & SQUARES) {
    numbers difference = score - mean;
    if (masked) difference = if_visible(score, difference);
    so_far->spread = fused(difference, difference, so_far->spread);
  }
  if (what & EXPONENTIALS) {
    numbers x = larger(all(LOWEST), score - top);
    weight = exponential(x);
    if (masked) weight = if_visible(score, weight);
    numbers product = weight * x;
    so_far->total += weight;
    so_far->first += product;
    if (what & SQUARES) {
      so_far->square = fused(weight, weight, so_far->square);
      so_far->second = fused(product, x, so_far->second);
    }
  }
  return weight;
}

/* The first key with this score, which is one of them or none; some other number if none has it. */
INLINE int64_t first_key_with(float top, const float *scores, int64_t keys) {
  int64_t key = 0;
  numbers score;
  for (; key + LANES <= keys; key += LANES) {
    memcpy(&score, scores + key, sizeof score);
    if (has(score, top)) break;
  }
  while (key < keys && scores[key] != top) key++;
  return key;
}

INLINE int some_nan(const float *scores, int64_t keys) {
  for (int64_t key = 0; key < keys; key++)
    if (scores[key] != scores[key]) return 1;
  return 0;
}

/* Where the sums of a row go. */
typedef struct {
  float *top, *count, *mean, *spread, *total, *square, *first, *second;
  int32_t *position;
} Results;

/* One row. `masked` and `what` are constants where this is called, so that what is not asked for costs nothing. */
INLINE void sum_row(const float *scores, float *weights, int64_t keys, int32_t first_key, float before, int what, int masked,
                    int position, int64_t row, const Results *into) {
  const int64_t whole = keys - keys % LANES;
  numbers score, next;
  /* The keys after the last whole register, as if pairs followed that are hidden. */
  numbers last = all(HIDDEN);
  memcpy(&last, scores + whole, (keys - whole) * sizeof(float));

  /* Two at once, since each step waits for the one before. */
  First even = {.top = all(HIDDEN)}, odd = even;
  double sum = 0;
  int64_t count = masked ? 0 : whole;
  for (int64_t start = 0; start <= whole; start += BLOCK) {
    const int64_t stop = smaller(whole, start + BLOCK);
    int64_t key = start;
    for (; key + 2 * LANES <= stop; key += 2 * LANES) {
      memcpy(&score, scores + key, sizeof score);
      memcpy(&next, scores + key + LANES, sizeof next);
      read_first(&even, score, masked);
      read_first(&odd, next, masked);
    }
    if (key < stop) {
      memcpy(&score, scores + key, sizeof score);
      read_first(&even, score, masked);
    }
    if (whole < start + BLOCK) read_first(&odd, last, 1);
    even.sum += odd.sum;
    odd.sum = (numbers){0};
    sum += taken(&even.sum);
    even.count += odd.count;
    odd.count = (numbers){0};
    count += taken(&even.count);
  }
  float top = largest(larger(even.top, odd.top));
  if (!(before <= top)) top = before; /* also where it is NaN */
  into->position[row] = position ? first_key + first_key_with(top, scores, keys) : 0;
  if (sum != sum && some_nan(scores, keys)) top = __builtin_nanf("");
  float mean = sum / (count > 0 ? count : 1);
  into->top[row] = top;
  into->count[row] = count;
  into->mean[row] = mean;
  if (!(what & (EXPONENTIALS | SQUARES))) return;

  Second second = {0};
  double spread = 0, total = 0, square = 0, of_first = 0, of_second = 0;
  for (int64_t start = 0; start <= whole; start += BLOCK) {
    for (int64_t key = start; key < smaller(whole, start + BLOCK); key += LANES) {
      memcpy(&score, scores + key, sizeof score);
      numbers weight = read_second(&second, score, top, mean, masked, what);
      if (what & WEIGHTS) memcpy(weights + key, &weight, sizeof weight);
    }
    if (whole < start + BLOCK) {
      numbers weight = read_second(&second, last, top, mean, 1, what);
      if (what & WEIGHTS) memcpy(weights + whole, &weight, (keys - whole) * sizeof(float));
    }
    spread += taken(&second.spread);
    total += taken(&second.total);
    square += taken(&second.square);
    of_first += taken(&second.first);
    of_second += taken(&second.second);
  }
  into->spread[row] = __builtin_sqrt(spread);
  into->total[row] = total;
  into->square[row] = __builtin_sqrt(square);
  into->first[row] = of_first;
  into->second[row] = of_second;
}

/* A call: the sums of a tile's rows.

   scores: (rows, keys), one row after the other; where WEIGHTS is asked for, exp(score − top) takes their place.
   before: the largest score of each row over keys before these, or NULL.
   ranges: two numbers for each of `period` queries, after which they repeat: the first key that the query sees, and the one
     after the last; NULL where each sees all keys.
   sums: where the sum number s of row r goes, at sums[s·stride + r], in the order of `Results`.
   positions: with POSITION, the first key with the largest score, where that is a key of this tile.
   With MASKED a score of −∞ is that of a hidden pair. */
typedef struct {
  float *scores;
  const float *before;
  const int32_t *ranges;
  float *sums;
  int32_t *positions;
  int64_t rows, keys, period, stride;
  int (*thread)(void), (*threads)(void); /* of OpenMP: the number of this thread, and how many share the rows */
  int32_t what;
} Call;

static void sum_rows(const Call *call, int64_t start, int64_t stop) {
  const int64_t stride = call->stride, keys = call->keys;
  float *sums = call->sums;
  Results into = {sums,
                  sums + stride,
                  sums + 2 * stride,
                  sums + 3 * stride,
                  sums + 4 * stride,
                  sums + 5 * stride,
                  sums + 6 * stride,
                  sums + 7 * stride,
                  call->positions};
  for (int64_t row = start; row < stop; row++) {
    const int32_t *range = call->ranges ? call->ranges + 2 * (row % call->period) : 0;
    int32_t first = range ? range[0] : 0;
    int64_t end = range ? range[1] : keys;
    float *of_row = call->scores + row * keys;
    float *seen = of_row + first;
    int64_t count = end - first;
    /* A row of hidden pairs alone has a finite top, so that no difference of tops is one of infinities. */
    float so_far = call->before ? call->before[row] : -__FLT_MAX__;
    if (call->what & WEIGHTS) {
      memset(of_row, 0, first * sizeof(float));
      memset(of_row + end, 0, (keys - end) * sizeof(float));
    }
#define CASE(wanted) \
  case wanted: \
    sum_row(seen, seen, count, first, so_far, (wanted) & ~MASKED, (wanted) & MASKED, \
            call->what & POSITION, row, &into); \
    break;
    switch (call->what & ~POSITION) {
      CASE(0)
      CASE(SQUARES)
      CASE(EXPONENTIALS)
      CASE(EXPONENTIALS | SQUARES)
      CASE(EXPONENTIALS | WEIGHTS)
      CASE(EXPONENTIALS | SQUARES | WEIGHTS)
      CASE(MASKED)
      CASE(MASKED | SQUARES)
      CASE(MASKED | EXPONENTIALS)
      CASE(MASKED | EXPONENTIALS | SQUARES)
      CASE(MASKED | EXPONENTIALS | WEIGHTS)
      CASE(MASKED | EXPONENTIALS | SQUARES | WEIGHTS)
    }
  }
}

static void sum_share(void *given) {
  const Call *call = given;
  int64_t thread = call->thread(), threads = call->threads();
  sum_rows(call, call->rows * thread / threads, call->rows * (thread + 1) / threads);
}

/* `parallel` is GOMP_parallel of the OpenMP that PyTorch uses, so that its threads do this too: a second set of threads would
   wait for the first, which spin. NULL for this thread alone. */
void massieu_row_sums(float *scores, const float *before, const int32_t *ranges, float *sums, int32_t *positions,
                      int64_t rows, int64_t keys, int64_t period, int64_t stride, int32_t what,
                      void (*parallel)(void (*)(void *), void *, unsigned, unsigned), int (*thread)(void),
                      int (*threads)(void), int32_t wanted) {
  Call call = {scores, before, ranges, sums, positions, rows, keys, period, stride, thread, threads, what};
  if (parallel && wanted > 1)
    parallel(sum_share, &call, wanted, 0);
  else
    sum_rows(&call, 0, rows);
}
