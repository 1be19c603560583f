/* The three BLAS functions that MLX's CPU backend imports.
 *
 * While decoding, a matrix product has as many rows as there are streams, and its time is that of reading the other
 * matrix once. The narrow kernels do just that, where a general sgemm first copies the matrix into packed blocks.
 * Wider products go to a real BLAS, a block of columns a call, on the threads of this file; the library runs
 * single-threaded, so no two pools of spinning threads fight for the cores.
 *
 * Up to NARROW rows an element of the result is the same sum in the same order, however many rows, columns or
 * threads there are: a sequence decoded alone and one decoded in a batch get the same bits.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };
enum {
    NARROW = 16,           /* most rows for the narrow kernels; beyond, packing pays */
    READ = 128 << 10,      /* bytes of the matrix that one chunk of a narrow product reads */
    BLOCK = 192,           /* columns in one chunk of a wide product, at most */
    STEP = 16,             /* and a multiple of this */
    SMALL = 1 << 18,       /* multiplications up to which a wide product is not worth sharing */
    SPINS = 20000,         /* looks at the ticket before a helper sleeps: some 100 microseconds */
};
#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef void sgemm_fn(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void dgemm_fn(int, int, int, int, int, int, double, const double *, int, const double *, int, double, double *,
                      int);
typedef void cgemm_fn(int, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *,
                      void *, int);

static sgemm_fn *real_sgemm;
static dgemm_fn *real_dgemm;
static cgemm_fn *real_cgemm;

/* c[m, n] = alpha * a[m, k] @ b[k, n] + beta * c, row-major; ta and tb say whether a and b lie transposed */
typedef struct {
    int ta, tb, m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    size_t lda, ldb, ldc;
} product;

typedef void kernel(const product *, int first, int last); /* computes the columns [first, last) of c */

/* ---- threads: chunks are claimed one at a time, so a helper that lost its core holds up one chunk at most ---- */

static struct {
    kernel *run;
    const product *p;
    int width;
} job;
static _Atomic uint64_t ticket; /* the job's number << 32 | its chunks not yet claimed */
static atomic_int finished, sleeping;
static int helpers;
static atomic_int alone; /* each caller keeps to its own thread */
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER, door = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;

static inline void relax(int i) {
    if (i % 64 == 63) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Runs one chunk if there is one. The job is read after the claim: it cannot change until the chunk is finished. */
static int run_chunk(void) {
    uint64_t t = atomic_load(&ticket);
    do
        if ((uint32_t)t == 0) return 0;
    while (!atomic_compare_exchange_weak(&ticket, &t, t - 1));
    int first = (int)((uint32_t)t - 1) * job.width, last = first + job.width;
    job.run(job.p, first, last < job.p->n ? last : job.p->n);
    atomic_fetch_add(&finished, 1);
    return 1;
}

static void *help(void *unused) {
    for (;;) {
        for (int i = 0; i < SPINS; i++)
            if (run_chunk()) i = 0;
            else relax(i);
        pthread_mutex_lock(&door);
        atomic_fetch_add(&sleeping, 1);
        while ((uint32_t)atomic_load(&ticket) == 0) pthread_cond_wait(&bell, &door);
        atomic_fetch_sub(&sleeping, 1);
        pthread_mutex_unlock(&door);
    }
    return unused;
}

/* In the same chunks whoever takes them: what OpenBLAS makes of a column depends on those beside it. */
static void share(kernel *run, const product *p, int width) {
    int chunks = (p->n - 1) / width + 1;
    if (helpers == 0 || chunks < 2 || atomic_load(&alone) || pthread_mutex_trylock(&busy) != 0) {
        for (int first = 0; first < p->n; first += width) run(p, first, p->n - first < width ? p->n : first + width);
        return;
    }
    job.run = run, job.p = p, job.width = width;
    atomic_store(&finished, 0);
    atomic_store(&ticket, ((atomic_load(&ticket) >> 32) + 1) << 32 | (uint32_t)chunks);
    if (atomic_load(&sleeping) > 0) {
        pthread_mutex_lock(&door);
        pthread_cond_broadcast(&bell);
        pthread_mutex_unlock(&door);
    }
    while (run_chunk()) {}
    for (int i = 0; atomic_load(&finished) < chunks; i++) relax(i);
    pthread_mutex_unlock(&busy);
}

/* ---- few rows ---- */

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef float vec4 __attribute__((vector_size(4 * sizeof(float)), may_alias));

static inline float sum(vec v) {
    union {
        vec all;
        vec4 part[LANES / 4];
    } u = {v};
    for (int half = LANES / 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) u.part[i] += u.part[i + half];
    vec4 s = u.part[0];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

#define UNROLL _Pragma("GCC unroll 8")
#define LOAD(address) (*(const vec *)(address))

/* b lies as [n, k]: ROWS x COLS dot products. k is a multiple of LANES. */
#define DOT(ROWS, COLS)                                                                            \
    static void dot_##ROWS##x##COLS(const product *p, int row, int col) {                          \
        const float *a = p->a + row * p->lda, *b = p->b + col * p->ldb;                            \
        const size_t lda = p->lda, ldb = p->ldb, ahead = 2 * COLS * ldb;                           \
        vec acc[ROWS][COLS] = {0};                                                                 \
        for (int i = 0; i < p->k; i += LANES)                                                      \
            UNROLL for (int y = 0; y < COLS; y++) {                                                \
                __builtin_prefetch(b + y * ldb + i + ahead);                                       \
                vec w = LOAD(b + y * ldb + i);                                                     \
                UNROLL for (int x = 0; x < ROWS; x++) acc[x][y] += LOAD(a + x * lda + i) * w;      \
            }                                                                                      \
        UNROLL for (int x = 0; x < ROWS; x++) UNROLL for (int y = 0; y < COLS; y++) {              \
            float *c = p->c + (row + x) * p->ldc + col + y;                                        \
            *c = p->alpha * sum(acc[x][y]) + (p->beta != 0 ? p->beta * *c : 0);                    \
        }                                                                                          \
    }
DOT(1, 8) DOT(1, 1) DOT(2, 4) DOT(2, 1) DOT(4, 4) DOT(4, 1) DOT(8, 2) DOT(8, 1)

#define DOT_ROWS(ROWS, COLS)                                                                       \
    for (; row + ROWS <= p->m; row += ROWS) {                                                      \
        int col = first;                                                                           \
        for (; col + COLS <= last; col += COLS) dot_##ROWS##x##COLS(p, row, col);                  \
        for (; col < last; col++) dot_##ROWS##x1(p, row, col);                                     \
    }

static void narrow_nt(const product *p, int first, int last) {
    int row = 0;
    DOT_ROWS(8, 2) DOT_ROWS(4, 4) DOT_ROWS(2, 4) DOT_ROWS(1, 8)
}

/* b lies as [k, n]: ROWS x (COLS * LANES) elements, adding one row of b after the other */
#define AXPY(ROWS, COLS)                                                                           \
    static void axpy_##ROWS##x##COLS(const product *p, int row, int col) {                         \
        const float *a = p->a + row * p->lda, *b = p->b + col;                                     \
        vec acc[ROWS][COLS] = {0};                                                                 \
        for (int i = 0; i < p->k; i++)                                                             \
            UNROLL for (int y = 0; y < COLS; y++) {                                                \
                vec w = LOAD(b + i * p->ldb + y * LANES);                                          \
                UNROLL for (int x = 0; x < ROWS; x++) acc[x][y] += a[x * p->lda + i] * w;          \
            }                                                                                      \
        UNROLL for (int x = 0; x < ROWS; x++) UNROLL for (int y = 0; y < COLS; y++) {              \
            vec *c = (vec *)(p->c + (row + x) * p->ldc + col + y * LANES);                         \
            acc[x][y] *= p->alpha;                                                                 \
            if (p->beta != 0) acc[x][y] += p->beta * *c;                                           \
            *c = acc[x][y];                                                                        \
        }                                                                                          \
    }
AXPY(1, 4) AXPY(1, 1) AXPY(4, 4) AXPY(4, 1)

#define AXPY_ROWS(ROWS)                                                                            \
    for (; row + ROWS <= p->m; row += ROWS) {                                                      \
        int col = first;                                                                           \
        for (; col + 4 * LANES <= last; col += 4 * LANES) axpy_##ROWS##x4(p, row, col);            \
        for (; col < last; col += LANES) axpy_##ROWS##x1(p, row, col);                             \
    }

static void narrow_nn(const product *p, int first, int last) {
    int row = 0;
    AXPY_ROWS(4) AXPY_ROWS(1)
}

/* ---- what MLX calls ---- */

static void wide(const product *p, int first, int last) {
    const float *b = p->b + first * (p->tb == TRANS ? p->ldb : 1);
    real_sgemm(ROW_MAJOR, p->ta, p->tb, p->m, last - first, p->k, p->alpha, p->a, p->lda, b, p->ldb, p->beta,
               p->c + first, p->ldc);
}

/* Columns of a narrow product that one chunk takes: a multiple of every kernel's step. */
static int narrow_width(int k) {
    int step = 4 * LANES, columns = READ / (int)sizeof(float) / k / step * step;
    return columns > step ? columns : step;
}

/* Columns of a wide product that one chunk takes: so many that threads have about equally many chunks. */
static int wide_width(int n) {
    int threads = helpers + 1, chunks = threads * ((n - 1) / (threads * BLOCK) + 1);
    return ((n - 1) / chunks / STEP + 1) * STEP;
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc) {
    const product p = {ta, tb, m, n, k, alpha, beta, a, b, c, lda, ldb, ldc};
    int narrow = ta == NO_TRANS && m <= NARROW && k > 0;
    if (order != ROW_MAJOR || m < 1 || n < 1)
        real_sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    else if (narrow && tb == TRANS && k % LANES == 0)
        share(narrow_nt, &p, narrow_width(k));
    else if (narrow && tb == NO_TRANS && n % LANES == 0)
        share(narrow_nn, &p, narrow_width(k));
    else
        share(wide, &p, (size_t)m * n * k <= SMALL ? n : wide_width(n));
}

void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc) {
    real_dgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
    real_cgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* Whether products are shared out: not when there is a caller for each core anyway. */
void emlxd_blas_share(int shared) { atomic_store(&alone, !shared); }

/* Takes the library's three functions and starts threads - 1 helpers. Only the first call counts. */
void emlxd_blas_start(sgemm_fn *s, dgemm_fn *d, cgemm_fn *c, int threads) {
    if (real_sgemm) return;
    real_sgemm = s, real_dgemm = d, real_cgemm = c;
    for (pthread_t t; threads > 1 && pthread_create(&t, 0, help, 0) == 0; threads--) {
        pthread_detach(t);
        helpers++;
    }
}
