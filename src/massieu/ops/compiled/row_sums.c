/* Sums over the keys of a tile of attention scores, from which the moments of each query's attention follow.

   Each row is read twice while it lies in the first-level cache. Plain tensor operations read the whole tile about twenty
   times from the second-level cache. What the sums are is said in moment_blocks.py, and how they are called in row_sums.py. */

#include <stdint.h>
#include <string.h>

/* As many numbers as a register holds. Each lane has a sum of its own. The lanes are added after each block of keys, and the
   blocks in double precision, so that the sums of long rows lose no digits. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

enum { BLOCK = 1024 }; /* a multiple of LANES */

typedef float numbers __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES))); /* of a comparison: −1 where it holds, else 0 */

/* What a call asks for; the same numbers stand in row_sums.py. */
enum { EXPONENTIALS = 1, SPREAD = 2, WEIGHTS = 4, MASKED = 8 };
/* Exponentials come with the spread, which costs little beside them, so that there are few cases to compile. */

/* The lowest number whose exp is still normal. A weight below it counts as this smallest weight. */
#define LOWEST (-87.0f)

/* The score of a hidden pair. */
#define HIDDEN (-__builtin_inff())

#define INLINE static inline __attribute__((always_inline))

INLINE numbers all(float value) { return value - (numbers){0}; }

INLINE numbers kept(integers where, numbers value) { return (numbers)(where & (integers)value); }

INLINE numbers chosen(integers where, numbers yes, numbers no) {
  return (numbers)((where & (integers)yes) | (~where & (integers)no));
}

INLINE integers lane_numbers(void) {
  integers result = {0};
  for (int lane = 0; lane < LANES; lane++) result[lane] = lane;
  return result;
}

INLINE int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

/* The sum of the lanes, which begin again at 0. */
INLINE float taken(numbers *lanes) {
  float sum[LANES];
  memcpy(sum, lanes, sizeof sum);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) sum[lane] += sum[lane + width];
  *lanes = (numbers){0};
  return sum[0];
}

/* exp of numbers in [LOWEST, 0], with an error of at most two units in the last place: 2^n·exp(rest), where |rest| ≤ log(2)/2
   and exp(rest) is a polynomial of degree 7. NaN stays NaN. */
INLINE numbers exponential(numbers x) {
  /* 1.5·2²³: a sum with it is rounded to a whole number, which then stands in its low bits. */
  const numbers shift = all(12582912.0f);
  numbers shifted = x * 1.44269504088896341f + shift;
  numbers n = shifted - shift;
  /* log(2) in two parts, of which the first has few digits: n times it is exact. */
  numbers rest = x - n * 0.693359375f;
  rest = rest + n * 2.12194440e-4f;
  numbers sum = all(1.0f / 5040.0f);
  sum = sum * rest + 1.0f / 720.0f;
  sum = sum * rest + 1.0f / 120.0f;
  sum = sum * rest + 1.0f / 24.0f;
  sum = sum * rest + 1.0f / 6.0f;
  sum = sum * rest + 0.5f;
  sum = sum * (rest * rest) + rest + 1.0f;
  return (numbers)((integers)sum + ((integers)shifted << 23));
}

/* What the first reading of a row finds, in each lane. */
typedef struct {
  numbers top, sum;
  integers places, count, unordered;
} First;

INLINE void read_first(First *so_far, numbers score, integers places, integers visible, int masked) {
  integers larger = score > so_far->top;
  integers unordered = score != score;
  if (masked) {
    larger &= visible;
    unordered &= visible;
    score = kept(visible, score);
    so_far->count -= visible;
  }
  so_far->top = chosen(larger, score, so_far->top);
  so_far->places = (larger & places) | (~larger & so_far->places);
  so_far->unordered |= unordered;
  so_far->sum += score;
}

/* What the second reading adds up, in each lane. */
typedef struct {
  numbers spread, total, square, first, second;
} Second;

/* Add some keys. Returns their weights exp(score − top). */
INLINE numbers read_second(Second *so_far, numbers score, float top, float mean, integers visible, int masked, int what) {
  numbers weight = {0};
  if (what & SPREAD) {
    numbers difference = score - mean;
    if (masked) difference = kept(visible, difference);
    so_far->spread += difference * difference;
  }
  if (what & EXPONENTIALS) {
    numbers x = score - top;
    x = chosen(x < LOWEST, all(LOWEST), x);
    weight = exponential(x);
    if (masked) weight = kept(visible, weight);
    numbers product = weight * x;
    so_far->total += weight;
    so_far->square += weight * weight;
    so_far->first += product;
    so_far->second += product * x;
  }
  return weight;
}

/* Where the sums of a row go. */
typedef struct {
  float *top, *count, *mean, *spread, *total, *square, *first, *second;
  int32_t *position;
} Results;

/* One row. `masked` and `what` are constants where this is called, so that what is not asked for costs nothing. */
INLINE void sum_row(const float *scores, float *weights, int64_t keys, int32_t first_key, float before, int what, int masked,
                    int64_t row, const Results *into) {
  const integers lanes = lane_numbers();
  const int64_t whole = keys - keys % LANES;
  numbers score;
  /* The keys after the last whole register. */
  numbers last = {0};
  memcpy(&last, scores + whole, (keys - whole) * sizeof(float));
  integers last_visible = lanes < (int32_t)(keys - whole);
  if (masked) last_visible &= last != HIDDEN;

  integers places = lanes + first_key;
  First first = {.top = all(-__builtin_inff())};
  double sum = 0;
  for (int64_t start = 0; start < whole; start += BLOCK) {
    for (int64_t key = start; key < smaller(whole, start + BLOCK); key += LANES) {
      memcpy(&score, scores + key, sizeof score);
      read_first(&first, score, places, score != HIDDEN, masked);
      places += LANES;
    }
    sum += taken(&first.sum);
  }
  read_first(&first, last, places, last_visible, 1);
  sum += taken(&first.sum);

  float top = before;
  int64_t count = masked ? 0 : whole;
  int unordered = 0;
  for (int lane = 0; lane < LANES; lane++) {
    count += first.count[lane];
    unordered |= first.unordered[lane];
    if (first.top[lane] > top) top = first.top[lane];
  }
  int32_t position = INT32_MAX;
  for (int lane = 0; lane < LANES; lane++)
    if (first.top[lane] == top && first.places[lane] < position) position = first.places[lane];
  if (unordered) top = __builtin_nanf("");
  float mean = sum / (count > 0 ? count : 1);
  into->top[row] = top;
  into->position[row] = position;
  into->count[row] = count;
  into->mean[row] = mean;
  if (!(what & (EXPONENTIALS | SPREAD))) return;

  Second second = {0};
  double spread = 0, total = 0, square = 0, of_first = 0, of_second = 0;
  for (int64_t start = 0; start <= whole; start += BLOCK) {
    for (int64_t key = start; key < smaller(whole, start + BLOCK); key += LANES) {
      memcpy(&score, scores + key, sizeof score);
      numbers weight = read_second(&second, score, top, mean, score != HIDDEN, masked, what);
      if (what & WEIGHTS) memcpy(weights + key, &weight, sizeof weight);
    }
    if (whole < start + BLOCK) {
      numbers weight = read_second(&second, last, top, mean, last_visible, 1, what);
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
   positions: the first key with the largest score, where that is a key of this tile.
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
    float so_far = -__builtin_inff();
    /* A row of hidden pairs alone has a finite top, so that no difference of tops is one of infinities. */
    if (range || (call->what & MASKED)) so_far = -__FLT_MAX__;
    if (call->before) so_far = call->before[row];
    if (call->what & WEIGHTS) {
      memset(of_row, 0, first * sizeof(float));
      memset(of_row + end, 0, (keys - end) * sizeof(float));
    }
#define CASE(wanted) \
  case wanted: \
    sum_row(seen, seen, count, first, so_far, (wanted) & ~MASKED, (wanted) & MASKED, row, &into); \
    break;
    switch (call->what) {
      CASE(0)
      CASE(SPREAD)
      CASE(EXPONENTIALS | SPREAD)
      CASE(EXPONENTIALS | WEIGHTS | SPREAD)
      CASE(MASKED)
      CASE(MASKED | SPREAD)
      CASE(MASKED | EXPONENTIALS | SPREAD)
      CASE(MASKED | EXPONENTIALS | WEIGHTS | SPREAD)
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
