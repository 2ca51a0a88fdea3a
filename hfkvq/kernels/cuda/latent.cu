// Attention of up to 16 query heads to one latent head of 512 + 64 channels: codes of 4 bits with one scale and minimum
// a token, rotary parts in e4m3, what is loose in 16 bits. For compute capability 9.0; compiled by `rtc.py`.
//
// A unit is four warps, out of step with the others. A step of a unit is four chunks of TOKENS tokens: each warp makes
// logits and probabilities of one chunk, and they meet at a barrier; then each warp adds all four chunks, for 128 of the
// 512 channels. So sums are split between warps, not repeated. Copies into the units' rings are made by four warps of
// their own, with few registers.
//
// A row's blocks are whole clusters. They join their sums in shared memory: each rotates its own back, and after a
// cluster barrier each joins a share of the queries, reading the others' shared memory; nobody leaves before a second
// one. So a cluster that is all of its row writes the result. Clusters of a longer row write sums, and of the blocks
// with the same share the last to have done so joins them, whichever it is: always in one order, so that results are the
// same.
//
// Codes are never converted: a masked word is a pair of f16 numbers, subnormal ones, which tensor cores take at full
// speed. Of a word's four fields two bytes are taken whole: x = f0 + 16 f1 and f0 are two operands for one mask each, as
// f0 q0 + f1 q1 = x q1/16 + f0 (q0 - q1/16), and the sums of f1 are those of x less those of f0, over 16.
//
// Macros: UNITS, SLOTS (chunks of a ring), TILES (chunks have 8 TILES tokens), BF16 (the model's dtype, or f16).
// tests/kernels/cuda runs this file on a CPU: EMULATED takes what stands in for the instructions from there.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
struct Pair { float x, y; };
DEVICE int thread() { return threadIdx.x; }
// Asked again where they are needed again, which takes no register meanwhile.
DEVICE int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(x));
  return x;
}
DEVICE int split_of_block() {
  int x;
  asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(x));
  return x;
}
DEVICE int row_of_block() {
  int x;
  asm volatile("mov.u32 %0, %ctaid.y;" : "=r"(x));
  return x;
}
extern __shared__ __align__(1024) u8 shared_[];
DEVICE u32 shared() { return (u32)__cvta_generic_to_shared(shared_); }
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void load_matrices(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
DEVICE void load_turned(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
DEVICE u32 load(u32 at) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
DEVICE float load_f(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
DEVICE void load4(u32 (&a)[4], u32 at) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
DEVICE void load4_f(float (&a)[4], u32 at) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(a[0]), "=f"(a[1]), "=f"(a[2]), "=f"(a[3]) : "r"(at) : "memory");
}
DEVICE void load2_f(float& a, float& b, u32 at) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(a), "=f"(b) : "r"(at) : "memory");
}
DEVICE void store(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEVICE void store_f(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
DEVICE void store2_f(u32 at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}
DEVICE void store4_f(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEVICE void store4(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Shared memory of another block of the cluster.
DEVICE u32 of_block(u32 at, int rank) {
  u32 x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(at), "r"(rank));
  return x;
}
DEVICE float load_far(u32 at) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
DEVICE void load4_far(float (&a)[4], u32 at) {
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(a[0]), "=f"(a[1]), "=f"(a[2]), "=f"(a[3]) : "r"(at) : "memory");
}
DEVICE void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Sixteen bytes from global memory, zeros if there are none.
DEVICE void copy(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void copy_or_zero(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_of(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred p;\n L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra D;\n bra L;\n D:\n}"
      ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void come_to_meet(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void meet_block() { __syncthreads(); }
DEVICE void meet_warp() { __syncwarp(); }
template <int N> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
DEVICE float from_lane(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE bool of_any(bool p) { return __any_sync(~0u, p); }
DEVICE u32 of_each(bool p) { return __ballot_sync(~0u, p); }
DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE u32 to_f16(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
DEVICE u32 to_bf16(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
DEVICE Pair from_f16(u32 x) {
  Pair y;
  asm("{.reg .b16 s, t; mov.b32 {s, t}, %2; cvt.f32.f16 %0, s; cvt.f32.f16 %1, t;}" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}
DEVICE Pair from_bf16(u32 x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }
DEVICE void from_e4m3(u32 x, u32& low, u32& high) {
  asm("{.reg .b16 s, t; mov.b32 {s, t}, %2; cvt.rn.f16x2.e4m3x2 %0, s; cvt.rn.f16x2.e4m3x2 %1, t;}"
      : "=r"(low), "=r"(high) : "r"(x));
}
DEVICE u32 times(u32 a, u32 b) {
  u32 x;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
DEVICE u32 bytes_of(u32 x, u32 which) { return __byte_perm(x, 0, which); }
// Past the L1 cache, which must not keep what is written while this kernel waits.
DEVICE u32 fetch(const void* p) {
  u32 x;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
DEVICE u32 fetch_half(const void* p) { return __ldcg((const u16*)p); }
DEVICE float fetch_f(const void* p) { return __uint_as_float(fetch(p)); }
DEVICE void fetch4_f(float (&a)[4], const float* p) {
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(a[0]), "=f"(a[1]), "=f"(a[2]), "=f"(a[3]) : "l"(p) : "memory");
}
DEVICE void fetch2_f(float& a, float& b, const float* p) {
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(a), "=f"(b) : "l"(p) : "memory");
}
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Counts to `count`, and is 0 again then. Returns the number before.
DEVICE u32 come(u32* counter, u32 count) {
  u32 x;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(x) : "l"(counter), "r"(count - 1) : "memory");
  return x;
}
DEVICE void put2(void* p, u32 a, u32 b) { *(uint2*)p = make_uint2(a, b); }
DEVICE void put2_f(float* p, float a, float b) { *(float2*)p = make_float2(a, b); }
DEVICE void put4(float* p, float a, float b, float c, float d) { *(float4*)p = make_float4(a, b, c, d); }
DEVICE void wait_for_grid() { asm volatile("griddepcontrol.launch_dependents;\n griddepcontrol.wait;" ::: "memory"); }
// What stands between two of these is a branch, and no selects in every lane.
DEVICE void stay() { asm volatile(""); }
// An address of which the compiler knows nothing: loads at constant distances then have no arithmetic of their own.
DEVICE const u8* as_it_is(const u8* p) {
  asm volatile("" : "+l"(p));
  return p;
}
DEVICE float infinity() { return __int_as_float(0x7f800000); }
#define GLOBAL extern "C" __global__
#endif

constexpr int WARP = 32, PAGE = 128, WIDTH = 512, ROTARY = 64;
// Queries as products take them: steps of 16 channels, of 512 bytes each.
constexpr int QUERIES = (WIDTH + ROTARY) / 16 * 512;
// Half of a query while it is rotated, with room to be shifted.
constexpr int ROTATING = (WIDTH / 2 + 20) * 4;
// Sums of a unit while a block joins them: rows are padded against bank conflicts.
constexpr int SUM_ROW = (WIDTH + 8) * 4, SUM_BYTES = 16 * SUM_ROW;
// What is loose is attended to by so many tokens at a time: numbers, rotary parts, probabilities.
constexpr int LOOSE = 32, LOOSE_ROTARY = LOOSE * 2 * WIDTH, LOOSE_PROBS = LOOSE_ROTARY + LOOSE * 2 * ROTARY;
// Queries are rotated behind them, where probabilities stand later.
constexpr int ROTATED_AT = LOOSE_PROBS, LOOSE_BYTES = ROTATED_AT + 4 * ROTATING;
// Warps join queries in slices of 128 channels: so many in global memory, what they are relative to, and their total.
constexpr int SLICES = 4, PART = WIDTH / SLICES + 4;
// Sums are relative to the greatest logit, and are not rescaled until one exceeds it by more than this, in units of ln 2:
// a probability is 16 at most, and its scale's product a number of f16 for all scales up to 4,094. What they are relative
// to is rounded up to a whole number, so that rescaling is exact, also of probabilities in f16.
constexpr float ROOM = 4.f;
// Stands for a maximum of nothing in differences, which are numbers then.
constexpr float LEAST = -3e38f;
// Codes are 2^24 times what stands in registers; queries of codes are 8 times too large, away from subnormal numbers.
constexpr float UNIT = 16777216.f, QUERY_UNIT = 8.f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NORM = 0.044194173824159216f;  // 512^-1/2, the rotation's factor

// Shared memory, and how a chunk lies in its slot: codes, rotary parts, then scales, minima and scales of rotary parts.
constexpr int TOKENS = 8 * TILES, OF_PAGE = PAGE / TOKENS;
constexpr int SLOT_ROTARY = TOKENS * 256, SLOT_META = TOKENS * 320, SLOT_TOPS = TOKENS * 326, SLOT = SLOT_TOPS + 64;
constexpr int RING = SLOTS * SLOT > LOOSE_BYTES ? SLOTS * SLOT : LOOSE_BYTES;
constexpr int WHOLE_QUERIES = QUERIES, FULL = 2 * QUERIES, EMPTY = FULL + 8 * UNITS * SLOTS;
constexpr int LOOSE_FULL = EMPTY + 8 * UNITS * SLOTS, FLAGS = LOOSE_FULL + 8 * UNITS, LENGTHS = FLAGS + 8 * UNITS;
constexpr int QUERY_SUMS = (LENGTHS + 8 + 127) / 128 * 128;
constexpr int TOPS = QUERY_SUMS + 64, TOTALS = TOPS + 64 * UNITS;
constexpr int RINGS = (TOTALS + 512 * UNITS + 127) / 128 * 128, SHARED = RINGS + UNITS * RING;
// Loose tokens are attended to, and queries rotated, in the end of a ring; pages fill its first slots meanwhile: EARLY of
// them, or where a unit has no loose tokens, those in front of the queries.
constexpr int EARLY = (RING - LOOSE_BYTES) / SLOT, ASIDE = EARLY * SLOT, IN_FRONT = (ASIDE + ROTATED_AT) / SLOT;
constexpr int WORKERS = 128 * UNITS, THREADS = WORKERS + 128, MEET_WORKERS = 8, MEET_ROTATED = 9;
static_assert(SHARED <= 232448 && LOOSE_BYTES >= SUM_BYTES && 4 * ROTATING >= LOOSE * 32 && UNITS < MEET_WORKERS, "room");
static_assert(IN_FRONT <= SLOTS, "slots in front of the queries");
static_assert(TILES == 2 || TILES == 4, "products take sixteen tokens");

struct Arguments {
  const u8* q;
  const int *counters, *table;
  const u8 *codes, *scale, *zero, *rotary, *rotary_scale;
  const u8 *sink, *sink_rotary, *tail, *tail_rotary;
  u8* out;
  // Of rows with several clusters: parts to write, and for each of a cluster's blocks how many have written theirs, 0 now.
  float* part;
  u32* arrived;
  const u8* logits;  // that join the denominators, in turns; null for none
  // columns: of the table. splits: blocks of a row, 2^cluster of them a cluster. weight: chunks that take as long as a
  // block of loose tokens. wide: whether logits are f32 and not of the model's dtype. scaling: times log2 e.
  int rows, heads, columns, splits, cluster, weight, sinks, slots, n_logits, wide;
  float scaling;
  long long row_stride, head_stride;  // of queries, in elements
};

// What a warp knows of itself. A lane's numbers of a product are of queries `row` and `row` + 8.
struct Self {
  int lane, unit, warp, column, row;  // warp: of its unit
  u32 ring, full, empty;
};

// Sums of 16 queries and this warp's channels; what they are relative to, and what the warp's own probabilities are.
struct Sums {
  float of[4][4][4];  // by eight words, operand and register
  float top[2], own_top[2], total[2], low[2];
};

DEVICE Pair from_half(u32 x) { return BF16 ? from_bf16(x) : from_f16(x); }
DEVICE u32 to_half(float low, float high) { return BF16 ? to_bf16(low, high) : to_f16(low, high); }
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (BF16) mma_bf16(c, a, b0, b1); else mma_f16(c, a, b0, b1);
}
DEVICE float greater(float a, float b) { return fmaxf(a, b); }

// The four stages of a Hadamard matrix's butterflies that stay within a lane.
DEVICE void butterflies(float (&v)[16]) {
#pragma unroll
  for (int s = 1; s < 16; s *= 2)
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (!(i & s)) {
        const float a = v[i], b = v[i + s];
        v[i] = a + b;
        v[i + s] = a - b;
      }
}

DEVICE void rescale(Sums& sums, float g0, float g1) {
#pragma unroll
  for (int g = 0; g < 4; g++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      sums.of[g][k][0] *= g0;
      sums.of[g][k][1] *= g0;
      sums.of[g][k][2] *= g1;
      sums.of[g][k][3] *= g1;
    }
}

// A lane's channels of a query. In the lane: bits 2, 4, 5 and 6 of the channel; by lanes: bits 0, 1, 3, 7 and 8.
struct Query { u32 own[16], rotary[2]; };
DEVICE int channel_of(int lane) { return (lane & 3) | (lane & 4) << 1 | (lane & 24) << 4; }

DEVICE void ask(Query& query, const u8* q, bool there, int lane) {
  const u8 *own = as_it_is(q + 2 * channel_of(lane)), *rotary = as_it_is(q + 2 * WIDTH + 4 * lane);
  if (there) {
#pragma unroll
    for (int i = 0; i < 16; i++) query.own[i] = fetch_half(own + ((i & 1) << 3 | (i & 14) << 4));
#pragma unroll
    for (int i = 0; i < 2; i++) query.rotary[i] = fetch_half(rotary + 2 * i);
  } else {
    query = {};
  }
}

// One warp rotates query m and lays it out as left operand of products with codes, and if `whole`, with loose tokens.
DEVICE void rotate_query(const Arguments& args, const Query& query, int m, bool whole, u32 scratch, int lane) {
  const u32 base = shared();
  const int from = channel_of(lane);
  float v[16];
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = from_half(query.own[i]).x;
  const Pair rotary = from_half(query.rotary[0] | query.rotary[1] << 16);
  butterflies(v);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float other = from_lane(v[i], 2);
    v[i] = lane & 2 ? other - v[i] : v[i] + other;
  }
  // In the lane from here: bits 0, 3, 7 and 8, that is a pair, halves of a step and the field; by lanes: bits 1, 2, 4, 5
  // and 6. Half of the lanes take what has bit 6 and half what has not, one after the other, so room is half a query's.
  // Bits 7 and 8 move numbers to banks that the other bits leave free.
  const u32 aside = scratch + 4 * ((from & 15) + (from >> 7) * 64 + (lane >> 1 & 4) + (lane & 16));
  const u32 back = scratch + 4 * ((lane & 3) << 1 | (lane & 12) << 2);
  float w[16];
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int i = 0; i < 8; i++) store_f(aside + 4 * ((i & 1) << 2 | (i & 6) << 3), v[8 * half + i]);
    meet_warp();
    if (lane / 16 == half) {
#pragma unroll
      for (int i = 0; i < 8; i++)
        load2_f(w[2 * i], w[2 * i + 1], back + 4 * (((i & 1) << 3 | (i & 6) << 5) + ((i & 2) << 1 | (i & 4) << 2)));
    }
    meet_warp();
  }
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = w[i];
  butterflies(v);
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] *= args.scaling * NORM;
  const float r0 = rotary.x * args.scaling, r1 = rotary.y * args.scaling;
  const u32 place = ((m & 7) * 4 + (lane & 3)) * 16 + (m >> 3) * 4;
  // Of one query eight banks hold everything. Half of the lanes store a step's second half first, so that all eight are
  // written at a time.
  const bool second = lane & 16;
  auto lay = [&](u32 at, u32 one, u32 two) {
    store(at + (second ? 8 : 0), second ? two : one);
    store(at + (second ? 0 : 8), second ? one : two);
  };
  if (whole) {
    // Sixteen channels in order are a step.
    const u32 at = base + WHOLE_QUERIES + (lane >> 2) * 512 + place;
#pragma unroll
    for (int i = 0; i < 4; i++)
      lay(at + i * 4096, to_half(v[4 * i], v[4 * i + 1]), to_half(v[4 * i + 2], v[4 * i + 3]));
    store(base + WHOLE_QUERIES + (32 + (lane >> 3)) * 512 + place + ((lane >> 2) & 1) * 8, to_half(r0, r1));
  }
  float total = 0;
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {
    u32 x[2], z[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float *low = v + 2 * half + 8 * pair, *high = low + 4;
      x[half] = to_f16(high[0] * (QUERY_UNIT / 16), high[1] * (QUERY_UNIT / 16));
      const Pair y = from_f16(x[half]);
      z[half] = to_f16(low[0] * QUERY_UNIT - y.x, low[1] * QUERY_UNIT - y.y);
      const Pair u = from_f16(z[half]);
      // As rounded: what minima are multiplied by fits what codes are.
      total += 17.f * (y.x + y.y) + u.x + u.y;
    }
    const u32 at = base + (4 * (lane >> 2) + 2 * pair) * 512 + place;
    lay(at, x[0], x[1]);
    lay(at + 512, z[0], z[1]);
  }
  // Sixteen bytes of a rotary part, which one load brings, are four of each of four steps.
  const u32 step = 32 + ((lane >> 1) & 3);
  store(base + step * 512 + ((m & 7) * 4 + (lane >> 3)) * 16 + (m >> 3) * 4 + (lane & 1) * 8, to_f16(r0, r1));
#pragma unroll
  for (int s = 1; s < WARP; s *= 2) total += from_lane(total, s);
  if (lane == 0) store_f(base + QUERY_SUMS + 4 * m, total * (1.f / QUERY_UNIT));
}

// A block of loose tokens, of the sink or of slots of the tail.
struct Loose {
  bool sink;
  int slots, start, sinks, sealed, oldest, length;
  const u8 *numbers, *rotary;
};

// Whether a token stands in a slot: in one of the tail, the oldest that is not sealed and that the slot can be of.
DEVICE bool stands(const Loose& loose, int slot) {
  const int ahead = slot - loose.oldest;
  const int token = loose.sink ? slot : loose.sealed + (ahead < 0 ? ahead + loose.slots : ahead) + loose.sinks;
  return slot < loose.slots && token < loose.length;
}

DEVICE Loose loose_of(const Arguments& args, int i_block, int row, int sealed, int length) {
  const int sinks = (args.sinks + LOOSE - 1) / LOOSE;
  const bool sink = i_block < sinks;
  const int slots = sink ? args.sinks : args.slots, start = (sink ? i_block : i_block - sinks) * LOOSE;
  const long long at = (long long)row * slots + start;
  return {sink, slots, start, args.sinks, sealed, sink ? 0 : sealed % slots, length,
          (sink ? args.sink : args.tail) + at * (2 * WIDTH),
          (sink ? args.sink_rotary : args.tail_rotary) + at * (2 * ROTARY)};
}

// One of four warps has its eight tokens of a block copied, zeros where none stands.
DEVICE void copy_loose(const Arguments& args, const Loose& loose, u32 ring, int warp, int lane) {
  const u32 all = of_each(stands(loose, loose.start + lane)) >> 8 * warp;
  const u32 to = ring + ASIDE + warp * 8192, to_rotary = ring + ASIDE + LOOSE_ROTARY + warp * 1024;
  const u8 *from = as_it_is(loose.numbers + warp * 8192 + lane * 16), *none = args.codes;
  const u8* rotary = as_it_is(loose.rotary + warp * 1024 + lane * 16);
#pragma unroll
  for (int t = 0; t < 8; t++) {
    const bool there = all >> t & 1;
    const u32 at = to + t * 1024 + ((lane ^ t) << 4);
    copy_or_zero(at, there ? from + t * 1024 : none, there);
    copy_or_zero(at + 512, there ? from + t * 1024 + 512 : none, there);
  }
  // Rotary parts of four tokens at a time.
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int t = 4 * h + lane / 8;
    const bool there = all >> t & 1;
    copy_or_zero(to_rotary + t * 128 + ((lane % 8 ^ t) << 4), there ? rotary + h * 512 : none, there);
  }
}

// The copying warps: each takes every fourth chunk of each unit, as soon as its slot is empty.
DEVICE void copy_pages(const Arguments& args, const int (&first)[UNITS], const int (&end)[UNITS], int row, int warp,
                       int lane, int i_unit, int busy) {
  const u32 base = shared();
  const int* table = args.table + (long long)row * args.columns;
  int most = 0;
#pragma unroll
  for (int i = 0; i < UNITS; i++) most = end[i] - first[i] > most ? end[i] - first[i] : most;
  // Rows of 256 bytes are swizzled by sixteens: neither of the two products meets bank conflicts.
  const u32 to_row = (lane >> 4) * 256, to_column = ((lane & 15) ^ (lane >> 4)) << 4;
  int slot = warp, turn = 0, next[UNITS];
  // Pages of all units are asked for at once, and before those in front are copied.
  auto look = [&](int k) {
#pragma unroll
    for (int i = 0; i < UNITS; i++)
      if (first[i] + k < end[i]) next[i] = (int)fetch(table + (first[i] + k) / OF_PAGE);
  };
  look(warp);
  // While the table is on its way: loose tokens. Only a row's first units have some.
#pragma unroll 1
  for (int i = 0; i < UNITS && i_unit + i < busy; i++) {
    const Loose loose = loose_of(args, i_unit + i, row, load(base + LENGTHS), load(base + LENGTHS + 4));
    copy_loose(args, loose, base + RINGS + i * RING, warp, lane);
    arrive_when_copied(base + LOOSE_FULL + 8 * i);
  }
#pragma unroll 1
  for (int k = warp; k < most; k += 4) {
    int pages[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) pages[i] = next[i];
    look(k + 4);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      const int chunk = first[i] + k;
      if (chunk < end[i]) {
        const long long page = pages[i];
        const int token = chunk % OF_PAGE * TOKENS;
        const u32 to = base + RINGS + i * RING + slot * SLOT, at = base + 8 * (i * SLOTS + slot);
        wait(at + EMPTY, turn & 1);
        const u8* from = args.codes + page * (PAGE * 256) + token * 256 + lane * 16;
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j++)
          copy(to + to_row + j * 512 + (to_column ^ ((2 * j & 7) << 4)), from + j * 512);
        from = args.rotary + page * (PAGE * ROTARY) + token * ROTARY + lane * 16;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) copy(to + SLOT_ROTARY + j * 512 + lane * 16, from + j * 512);
        if (lane < 3 * TILES) {
          const u8* meta = lane < TILES ? args.scale : lane < 2 * TILES ? args.zero : args.rotary_scale;
          copy(to + SLOT_META + lane * 16, meta + page * (2 * PAGE) + token * 2 + lane % TILES * 16);
        }
        arrive_when_copied(at + FULL);
      }
    }
    slot += 4;
    if (slot >= SLOTS) {
      slot -= SLOTS;
      turn++;
    }
  }
  copies_done();
}

// A unit attends to a block that has been copied: eight tokens' logits a warp, then channels as of pages.
DEVICE void attend_loose(Sums& sums, const Self& self, const Loose& loose) {
  const int lane = self.lane, warp = self.warp, start = loose.start;
  if (!of_any(stands(loose, start + lane))) return;
  const u32 base = shared(), aside = self.ring + ASIDE, meet_at = base + TOTALS + self.unit * 512 + 4 * self.row;
  float s[4][4] = {};
  const u32 numbers = aside + (8 * warp + (lane & 7)) * 1024;
  const u32 rotaries = aside + LOOSE_ROTARY + (8 * warp + (lane & 7)) * 128;
  // A third of it at a time: what runs once waits for its instructions longer than for their results.
#pragma unroll 6
  for (int j = 0; j < 18; j++) {
    u32 a[4], b[4];
    load_matrices(b, j < 16 ? numbers + (((4 * j + (lane >> 3)) ^ (lane & 7)) << 4)
                            : rotaries + (((4 * (j - 16) + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      load4(a, base + WHOLE_QUERIES + (2 * j + h) * 512 + lane * 16);
      mma(s[(2 * j + h) & 3], a, b[2 * h], b[2 * h + 1]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; j++) s[0][j] = (s[0][j] + s[1][j]) + (s[2][j] + s[3][j]);
  if (!stands(loose, start + 8 * warp + 2 * self.column)) s[0][0] = s[0][2] = -infinity();
  if (!stands(loose, start + 8 * warp + 2 * self.column + 1)) s[0][1] = s[0][3] = -infinity();
  float p[4];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float most = greater(s[0][2 * h], s[0][2 * h + 1]);
    most = greater(most, from_lane(most, 1));
    most = greater(most, from_lane(most, 2));
    const float top = greater(sums.top[h], ceilf(most)), relative = greater(top, LEAST);
    p[2 * h] = power_of_two(s[0][2 * h] - relative);
    p[2 * h + 1] = power_of_two(s[0][2 * h + 1] - relative);
    sums.total[h] = sums.total[h] * power_of_two(sums.own_top[h] - relative) + p[2 * h] + p[2 * h + 1];
    sums.own_top[h] = top;
    // Probabilities are relative to the warp's own maximum.
    if (self.column == 0) store_f(meet_at + warp * 128 + 32 * h, top);
  }
  // Half of an operand: eight tokens of sixteen.
  const u32 at = aside + LOOSE_PROBS + (warp >> 1) * 512 + lane * 16 + (warp & 1) * 8;
  store(at, to_half(p[0], p[1]));
  store(at + 4, to_half(p[2], p[3]));
  meet(1 + self.unit, 128);
  float less[2][4], g[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float top = sums.top[h];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      less[h][j] = load_f(meet_at + j * 128 + 32 * h);
      top = greater(top, less[h][j]);
    }
    const float relative = greater(top, LEAST);
#pragma unroll
    for (int j = 0; j < 4; j++) less[h][j] = power_of_two(less[h][j] - relative);
    g[h] = power_of_two(sums.top[h] - relative);
    sums.top[h] = top;
  }
  rescale(sums, g[0], g[1]);
#pragma unroll
  for (int tb = 0; tb < 2; tb++) {
    u32 a[4];
    load4(a, aside + LOOSE_PROBS + tb * 512 + lane * 16);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const Pair x = from_half(a[j]);
      const float shrink = less[j & 1][2 * tb + j / 2];
      a[j] = to_half(x.x * shrink, x.y * shrink);
    }
    const u32 tokens = aside + (16 * tb + (lane & 15)) * 1024;
#pragma unroll
    for (int f = 0; f < 4; f++)
#pragma unroll
      for (int g = 0; g < 4; g += 2) {
        u32 b[4];
        load_turned(b, tokens + (((16 * f + 4 * warp + g + (lane >> 4)) ^ (lane & 7)) << 4));
        mma(sums.of[g][f], a, b[0], b[1]);
        mma(sums.of[g + 1][f], a, b[2], b[3]);
      }
  }
}

// Sums of channels as sums of codes are: by pairs of fields, and in their unit.
DEVICE void as_codes(Sums& sums) {
#pragma unroll
  for (int g = 0; g < 4; g++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float x0 = sums.of[g][0][j], x1 = sums.of[g][1][j], x2 = sums.of[g][2][j], x3 = sums.of[g][3][j];
      sums.of[g][0][j] = (x0 + 16.f * x1) * (1.f / UNIT);
      sums.of[g][1][j] = x0 * (1.f / UNIT);
      sums.of[g][2][j] = (x2 + 16.f * x3) * (1.f / UNIT);
      sums.of[g][3][j] = x2 * (1.f / UNIT);
    }
}

constexpr u32 BYTES = 0x00ff00ffu, FIELD = 0x000f000fu, UPPER = 0x4341;  // UPPER: each half's upper byte, as a number

// One warp's part of a step's first half: logits and probabilities of the chunk in a slot, `left` tokens of it or all.
DEVICE void probabilities(Sums& sums, const Self& self, u32 slot, int left, u32 flag, int chunk) {
  const int lane = self.lane, row = self.row, column = self.column;
  const u32 base = shared(), queries = base + lane * 16;
  const u32 codes = slot + (lane & 7) * 256 + (lane >> 4) * 2048, swizzle = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
  float s[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) s[t][0] = s[t][1] = s[t][2] = s[t][3] = 0;
#pragma unroll
  for (int e = 0; e < 8; e++) {
    u32 b[TILES / 2][4], upper[TILES / 2][4], a[4];
#pragma unroll
    for (int i = 0; i < TILES / 2; i++)
      load_matrices(b[i], codes + i * 4096 + (swizzle ^ ((2 * e & 7) << 4)) + (e >> 2) * 128);
#pragma unroll
    for (int i = 0; i < TILES / 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) upper[i][j] = bytes_of(b[i][j], UPPER);
#define WORD(x, j) x[t / 2][2 * (t & 1) + j]
    load4(a, queries + 4 * e * 512);
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_f16(s[t], a, WORD(b, 0) & BYTES, WORD(b, 1) & BYTES);
    load4(a, queries + (4 * e + 1) * 512);
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_f16(s[t], a, WORD(b, 0) & FIELD, WORD(b, 1) & FIELD);
    load4(a, queries + (4 * e + 2) * 512);
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_f16(s[t], a, WORD(upper, 0), WORD(upper, 1));
    load4(a, queries + (4 * e + 3) * 512);
#pragma unroll
    for (int t = 0; t < TILES; t++) mma_f16(s[t], a, WORD(upper, 0) & FIELD, WORD(upper, 1) & FIELD);
#undef WORD
  }
  const u32 meta = slot + SLOT_META + 4 * column;
  const float of0 = load_f(base + QUERY_SUMS + 4 * row), of1 = load_f(base + QUERY_SUMS + 32 + 4 * row);
  u32 scales[TILES], zeros[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    scales[t] = load(meta + 16 * t);
    zeros[t] = load(meta + 2 * TOKENS + 16 * t);
    const Pair x = from_f16(scales[t]), z = from_f16(zeros[t]);
    const float x0 = x.x * (UNIT / QUERY_UNIT), x1 = x.y * (UNIT / QUERY_UNIT);
    s[t][0] = s[t][0] * x0 + z.x * of0;
    s[t][1] = s[t][1] * x1 + z.y * of0;
    s[t][2] = s[t][2] * x0 + z.x * of1;
    s[t][3] = s[t][3] * x1 + z.y * of1;
  }
  // Rotary parts, two tiles at a time: there are no more registers.
#pragma unroll
  for (int i = 0; i < TILES / 2; i++) {
    float o[2][4];
    u32 y[2][4];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0;
      load4(y[t], slot + SLOT_ROTARY + (2 * i + t) * 512 + lane * 16);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 a[4];
      load4(a, queries + (32 + j) * 512);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        u32 b0, b1;
        from_e4m3(y[t][j], b0, b1);
        mma_f16(o[t], a, b0, b1);
      }
    }
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const Pair x = from_f16(load(meta + 4 * TOKENS + 16 * (2 * i + t)));
      float(&z)[4] = s[2 * i + t];
      z[0] += o[t][0] * x.x;
      z[1] += o[t][1] * x.y;
      z[2] += o[t][2] * x.x;
      z[3] += o[t][3] * x.y;
    }
  }
  if (left < TOKENS) {
    // What was never written may be NaN.
    stay();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int there = left - 8 * t - 2 * column;
      if (there < 1) s[t][0] = s[t][2] = -infinity();
      if (there < 2) s[t][1] = s[t][3] = -infinity();
      const u32 keep = there >= 2 ? 0xffffffffu : there == 1 ? 0xffffu : 0;
      scales[t] &= keep;
      zeros[t] &= keep;
    }
    stay();
  }
  float m0 = s[0][0], m1 = s[0][2];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    m0 = greater(m0, greater(s[t][0], s[t][1]));
    m1 = greater(m1, greater(s[t][2], s[t][3]));
  }
  float top0 = sums.top[0], top1 = sums.top[1];
  if (of_any(m0 > top0 + ROOM || m1 > top1 + ROOM)) {
    m0 = greater(m0, from_lane(m0, 1));
    m1 = greater(m1, from_lane(m1, 1));
    m0 = greater(m0, from_lane(m0, 2));
    m1 = greater(m1, from_lane(m1, 2));
    top0 = greater(top0, ceilf(m0));
    top1 = greater(top1, ceilf(m1));
  }
  const float r0 = greater(top0, LEAST), r1 = greater(top1, LEAST);
  if (of_any(top0 != sums.own_top[0] || top1 != sums.own_top[1])) {
    const float g0 = power_of_two(sums.own_top[0] - r0), g1 = power_of_two(sums.own_top[1] - r1);
    sums.total[0] *= g0;
    sums.low[0] *= g0;
    sums.total[1] *= g1;
    sums.low[1] *= g1;
    sums.own_top[0] = top0;
    sums.own_top[1] = top1;
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const Pair x = from_f16(scales[t]), z = from_f16(zeros[t]);
    const float p0 = power_of_two(s[t][0] - r0), p1 = power_of_two(s[t][1] - r0);
    const float p2 = power_of_two(s[t][2] - r1), p3 = power_of_two(s[t][3] - r1);
    sums.total[0] += p0;
    sums.total[0] += p1;
    sums.total[1] += p2;
    sums.total[1] += p3;
    sums.low[0] += p0 * z.x;
    sums.low[0] += p1 * z.y;
    sums.low[1] += p2 * z.x;
    sums.low[1] += p3 * z.y;
    s[t][0] = p0 * x.x;
    s[t][1] = p1 * x.y;
    s[t][2] = p2 * x.x;
    s[t][3] = p3 * x.y;
  }
  // Over the rotary parts, each lane where it read them; as left operand of sixteen tokens.
#pragma unroll
  for (int i = 0; i < TILES / 2; i++) {
    u32 p[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float low = s[2 * i + j / 2][2 * (j & 1)], high = s[2 * i + j / 2][2 * (j & 1) + 1];
      p[j] = to_f16(low, high);
      if (BF16) continue;
      // Codes are 7.5 on average, where numbers are next to 0: what rounding takes from that goes to the minima.
      const Pair rounded = from_f16(p[j]);
      sums.low[j & 1] += 7.5f * ((low - rounded.x) + (high - rounded.y));
    }
    store4(slot + SLOT_ROTARY + i * 512 + lane * 16, p[0], p[1], p[2], p[3]);
  }
  if (column == 0) {
    store_f(slot + SLOT_TOPS + 4 * row, top0);
    store_f(slot + SLOT_TOPS + 32 + 4 * row, top1);
  }
  if (top0 != sums.top[0] || top1 != sums.top[1]) store(flag, chunk);
}

DEVICE u32 slot_of(const Self& self, int slot) { return self.ring + (slot < SLOTS ? slot : slot - SLOTS) * SLOT; }

// Somebody's logits exceed what sums are relative to: all move to the greatest of the chunks' maxima.
DEVICE void move(Sums& sums, const Self& self, int slot, int here) {
  float top[2] = {sums.top[0], sums.top[1]}, own[2] = {sums.top[0], sums.top[1]}, g[2];
#pragma unroll 1
  for (int i = 0; i < here; i++) {
    const u32 at = slot_of(self, slot + i) + SLOT_TOPS + 4 * self.row;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float x = load_f(at + 32 * h);
      top[h] = greater(top[h], x);
      if (i == self.warp) own[h] = x;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float relative = greater(top[h], LEAST);
    g[h] = power_of_two(sums.top[h] - relative);
    own[h] = power_of_two(own[h] - relative);
    sums.top[h] = top[h];
  }
  rescale(sums, g[0], g[1]);
  if (self.warp < here) {
    const u32 less0 = to_f16(own[0], own[0]), less1 = to_f16(own[1], own[1]);
    const u32 at = slot_of(self, slot + self.warp) + SLOT_ROTARY + self.lane * 16;
#pragma unroll
    for (int i = 0; i < TILES / 2; i++) {
      u32 p[4];
      load4(p, at + i * 512);
      store4(at + i * 512, times(p[0], less0), times(p[1], less1), times(p[2], less0), times(p[3], less1));
    }
  }
}

// One warp's part of a step's second half: a chunk's tokens, by their probabilities, added for its channels.
DEVICE void add_tokens(Sums& sums, u32 probs, u32 low, u32 high) {
#pragma unroll
  for (int i = 0; i < TILES / 2; i++) {
    u32 p[4], b[2][4];
    load_turned(b[0], low + i * 4096);
    load_turned(b[1], high + i * 4096);
    load4(p, probs + i * 512);
#pragma unroll
    for (int g = 0; g < 4; g++) {
      const u32 x = b[g / 2][2 * (g & 1)], y = b[g / 2][2 * (g & 1) + 1];
      const u32 upper_x = bytes_of(x, UPPER), upper_y = bytes_of(y, UPPER);
      mma_f16(sums.of[g][0], p, x & BYTES, y & BYTES);
      mma_f16(sums.of[g][1], p, x & FIELD, y & FIELD);
      mma_f16(sums.of[g][2], p, upper_x, upper_y);
      mma_f16(sums.of[g][3], p, upper_x & FIELD, upper_y & FIELD);
    }
  }
}

// A warp's sums into its unit's ring, for the block to join.
DEVICE void hand_over(Sums& sums, const Self& self) {
  const u32 base = shared(), to = self.ring + self.row * SUM_ROW + (32 * self.warp + 2 * self.column) * 4;
#pragma unroll
  for (int g = 0; g < 4; g++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 at = to + h * (8 * SUM_ROW) + g * 32;
      const int x = 2 * h, y = x + 1;
      const float(&of)[4][4] = sums.of[g];
      store2_f(at, of[1][x] * UNIT, of[1][y] * UNIT);
      store2_f(at + 512, (of[0][x] - of[1][x]) * (UNIT / 16), (of[0][y] - of[1][y]) * (UNIT / 16));
      store2_f(at + 1024, of[3][x] * UNIT, of[3][y] * UNIT);
      store2_f(at + 1536, (of[2][x] - of[3][x]) * (UNIT / 16), (of[2][y] - of[3][y]) * (UNIT / 16));
    }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float gain = power_of_two(sums.own_top[h] - greater(sums.top[h], LEAST));
    float total = sums.total[h] * gain, low = sums.low[h] * gain;
#pragma unroll
    for (int s = 1; s < 4; s *= 2) {
      total += from_lane(total, s);
      low += from_lane(low, s);
    }
    if (self.column == 0) {
      const u32 at = base + TOTALS + (self.unit * 4 + self.warp) * 128 + 32 * h + 4 * self.row;
      store_f(at, total);
      store_f(at + 64, low);
      if (self.warp == 0) store_f(base + TOPS + self.unit * 64 + 32 * h + 4 * self.row, sums.top[h]);
    }
  }
}

// One warp joins the units' sums of query m and rotates them back, in place of those of the first unit. Sixteen bytes are
// not the g-th but the g ^ (g / 8 % 4)-th, so that lanes that take four in a row meet no bank conflicts.
DEVICE void join_units(int m, int lane) {
  const u32 base = shared(), mine = base + RINGS + m * SUM_ROW, row = mine + lane * 64, turn = (lane & 6) << 3;
  float gain[UNITS], top = -infinity(), total = 0, low = 0, v[16];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    gain[i] = load_f(base + TOPS + i * 64 + 4 * m);
    top = greater(top, gain[i]);
  }
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    gain[i] = power_of_two(gain[i] - greater(top, LEAST));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      total += gain[i] * load_f(base + TOTALS + (i * 4 + j) * 128 + 4 * m);
      low += gain[i] * load_f(base + TOTALS + (i * 4 + j) * 128 + 64 + 4 * m);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    v[i] = low;
#pragma unroll
    for (int j = 0; j < UNITS; j++) v[i] += gain[j] * load_f(mine + j * RING + (i * WARP + lane) * 4);
  }
  butterflies(v);
  meet_warp();
#pragma unroll
  for (int i = 0; i < 16; i++) store_f(mine + i * (WARP * 4) + ((lane / 4 ^ i % 4) * 16 + lane % 4 * 4), v[i]);
  meet_warp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x[4];
    load4_f(x, row + ((16 * i) ^ turn));
    v[4 * i] = x[0];
    v[4 * i + 1] = x[1];
    v[4 * i + 2] = x[2];
    v[4 * i + 3] = x[3];
  }
  butterflies(v);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float x = from_lane(v[i], 1);
    v[i] = (lane & 1 ? x - v[i] : v[i] + x) * NORM;
  }
  // Each lane where it read.
#pragma unroll
  for (int i = 0; i < 4; i++)
    store4_f(row + ((16 * i) ^ turn), v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  if (lane == 0) {
    store_f(base + TOPS + 4 * m, top);
    store_f(base + TOTALS + 4 * m, total);
  }
}

// A lane's channels of a slice, what they are relative to, and the total.
struct Joined { float of[4], top, total; };

template <int N> DEVICE void fold(Joined& joined, const Joined (&parts)[N]) {
  float top = joined.top;
#pragma unroll
  for (int i = 0; i < N; i++) top = greater(top, parts[i].top);
  const float relative = greater(top, LEAST), less = power_of_two(joined.top - relative);
  joined.top = top;
  joined.total *= less;
#pragma unroll
  for (int j = 0; j < 4; j++) joined.of[j] *= less;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float gain = power_of_two(parts[i].top - relative);
    joined.total += gain * parts[i].total;
#pragma unroll
    for (int j = 0; j < 4; j++) joined.of[j] += gain * parts[i].of[j];
  }
}

// Writes a slice of query m, joined with its logit if there is one.
DEVICE void put_result(const Arguments& args, Joined joined, int m, int slice, int row, int lane) {
  if (args.logits) {
    const int i = (row * args.heads + m) % args.n_logits;
    const float x = LOG2E * (args.wide ? fetch_f(args.logits + 4 * i) : from_half(fetch_half(args.logits + 2 * i)).x);
    const float relative = greater(greater(joined.top, x), LEAST), less = power_of_two(joined.top - relative);
    joined.total = joined.total * less + power_of_two(x - relative);
#pragma unroll
    for (int j = 0; j < 4; j++) joined.of[j] *= less;
  }
  const float over = 1.f / greater(joined.total, 1e-30f);
  put2(args.out + 2 * (((long long)row * args.heads + m) * WIDTH + slice * (WIDTH / SLICES) + lane * 4),
       to_half(joined.of[0] * over, joined.of[1] * over), to_half(joined.of[2] * over, joined.of[3] * over));
}

// What a block joins of its row: slices of the queries from `first` on, of `groups` clusters.
struct Share { int row, first, items, group, groups; };

DEVICE float* part_of(const Arguments& args, const Share& share, int group, int item) {
  return args.part +
         (((long long)share.row * share.groups + group) * (args.heads * SLICES) + share.first * SLICES + item) * PART;
}

// One warp joins N items, every 4 UNITS-th from `item` on, of up to B blocks of its cluster, whose shared memory it reads:
// what they stored before they arrived at the cluster's barrier (release) and this one passed it (acquire).
template <int B, int N> DEVICE void join_cluster(const Arguments& args, const Share& share, int item, int lane) {
  const u32 base = shared();
  Joined parts[N][B];
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int i = item + k * 4 * UNITS, m = share.first + i / SLICES;
    const u32 from = base + RINGS + m * SUM_ROW + i % SLICES * (WIDTH / SLICES * 4) + (lane ^ lane / 8) * 16;
#pragma unroll
    for (int b = 0; b < B; b++) {
      parts[k][b] = {{0, 0, 0, 0}, -infinity(), 0};
      if (i < share.items && b < 1 << args.cluster) {
        load4_far(parts[k][b].of, of_block(from, b));
        parts[k][b].top = load_far(of_block(base + TOPS + 4 * m, b));
        parts[k][b].total = load_far(of_block(base + TOTALS + 4 * m, b));
      }
    }
  }
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int i = item + k * 4 * UNITS;
    if (i >= share.items) continue;
    Joined joined = {{0, 0, 0, 0}, -infinity(), 0};
    fold(joined, parts[k]);
    if (share.groups > 1) {
      float* to = part_of(args, share, share.group, i);
      put4(to + lane * 4, joined.of[0], joined.of[1], joined.of[2], joined.of[3]);
      if (lane == 0) put2_f(to + WIDTH / SLICES, joined.top, joined.total);
    } else {
      put_result(args, joined, share.first + i / SLICES, i % SLICES, share.row, lane);
    }
  }
}

// One warp joins N items of the row's clusters, G of them at a time.
template <int G, int N> DEVICE void join_row(const Arguments& args, const Share& share, int item, int lane) {
  Joined joined[N];
#pragma unroll
  for (int k = 0; k < N; k++) joined[k] = {{0, 0, 0, 0}, -infinity(), 0};
#pragma unroll 1
  for (int g = 0; g < share.groups; g += G) {
    Joined parts[N][G];
#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
      for (int j = 0; j < G; j++) {
        const int i = item + k * 4 * UNITS;
        parts[k][j] = {{0, 0, 0, 0}, -infinity(), 0};
        if (i < share.items && g + j < share.groups) {
          const float* from = part_of(args, share, g + j, i);
          fetch4_f(parts[k][j].of, from + lane * 4);
          fetch2_f(parts[k][j].top, parts[k][j].total, from + WIDTH / SLICES);
        }
      }
#pragma unroll
    for (int k = 0; k < N; k++) fold(joined[k], parts[k]);
  }
#pragma unroll
  for (int k = 0; k < N; k++) {
    const int i = item + k * 4 * UNITS;
    if (i < share.items) put_result(args, joined[k], share.first + i / SLICES, i % SLICES, share.row, lane);
  }
}

GLOBAL void __launch_bounds__(THREADS, 1) latent_attention(const __grid_constant__ Arguments args) {
  Self self;
  const int lane = thread() % WARP, i_warp = thread() / WARP;
  const int row = row_of_block(), split = split_of_block();
  const u32 base = shared();
  if (thread() < UNITS * SLOTS) {
    barrier_of(base + FULL + 8 * thread(), WARP);
    barrier_of(base + EMPTY + 8 * thread(), 4);
  }
  if (thread() < UNITS) barrier_of(base + LOOSE_FULL + 8 * thread(), 128);
  if (thread() < 2 * UNITS) store(base + FLAGS + 4 * thread(), ~0u);
  meet_block();
  wait_for_grid();
  // Nobody waits for one answer before asking for what does not depend on it: counters, queries and, into the L2 cache,
  // the table.
  // Loose tokens go to a row's first units, a block of them each, which get fewer chunks.
  const int units = args.splits * UNITS;
  const int blocks = (args.sinks + LOOSE - 1) / LOOSE + (args.slots + LOOSE - 1) / LOOSE;
  const int busy = blocks < units ? blocks : units;
  auto first_of = [&](int i, int chunks) {
    const int share = (u32)(chunks + args.weight * busy) * (u32)i / (u32)units;
    const int first = share - args.weight * (i < busy ? i : busy);
    return first > 0 ? first : 0;
  };
  // Each role is one branch: registers are given and taken by it.
  if (i_warp >= 4 * UNITS) {
    if (UNITS == 3) fewer_registers<56>();
    const int sealed = fetch(args.counters + 2 * args.rows + row), length = fetch(args.counters + args.rows + row);
    const int chunks = (sealed + TOKENS - 1) / TOKENS;
    // Which columns are needed depends on the counters, so all are; rows of more lines are long enough to hide one.
    if (i_warp == 4 * UNITS && args.columns <= 4096) {
#pragma unroll 1
      for (int i = 32 * lane; i < args.columns; i += 1024) prefetch(args.table + (long long)row * args.columns + i);
    }
    int first[UNITS], end[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      first[i] = first_of(split * UNITS + i, chunks);
      end[i] = first_of(split * UNITS + i + 1, chunks);
    }
    // All four warps write the same two numbers: each reads them at once, the workers after the barrier.
    if (lane == 0) {
      store(base + LENGTHS, sealed);
      store(base + LENGTHS + 4, length);
    }
    meet_warp();
    come_to_meet(MEET_ROTATED, THREADS);
    copy_pages(args, first, end, row, i_warp % 4, lane, split * UNITS, busy);
    meet(MEET_WORKERS, THREADS);
#pragma unroll 1
    for (int m = i_warp; m < args.heads; m += THREADS / WARP) join_units(m, lane);
    // All threads come to the cluster's barriers.
    arrive_cluster();
    wait_cluster();
    arrive_cluster();
    wait_cluster();
  } else {
    if (UNITS == 3) more_registers<152>();
    self.lane = lane;
    self.unit = i_warp / 4;
    self.warp = i_warp % 4;
    self.column = lane % 4;
    self.row = lane / 4;
    self.ring = base + RINGS + self.unit * RING;
    self.full = base + FULL + 8 * SLOTS * self.unit;
    self.empty = base + EMPTY + 8 * SLOTS * self.unit;
    const int i_unit = split * UNITS + self.unit;
    if (lane < (i_unit < busy ? EARLY : IN_FRONT)) arrive(self.empty + 8 * lane);
    const u8* q = args.q + 2 * row * args.row_stride;
    constexpr int ROUNDS = (16 + 4 * UNITS - 1) / (4 * UNITS);
    Query queries[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int m = i_warp + i * 4 * UNITS;
      ask(queries[i], q + 2 * m * args.head_stride, m < args.heads, lane);
    }
#pragma unroll 1
    for (int m = i_warp; m < 16; m += 4 * UNITS) {
      rotate_query(args, queries[0], m, split * UNITS < busy, self.ring + ASIDE + ROTATED_AT + self.warp * ROTATING,
                   lane);
#pragma unroll
      for (int i = 0; i + 1 < ROUNDS; i++) queries[i] = queries[i + 1];
    }
    meet(MEET_ROTATED, THREADS);
    const int sealed = load(base + LENGTHS), chunks = (sealed + TOKENS - 1) / TOKENS;
    Sums sums;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sums.top[h] = sums.own_top[h] = -infinity();
      sums.total[h] = sums.low[h] = 0;
    }
#pragma unroll
    for (int g = 0; g < 4; g++)
#pragma unroll
      for (int k = 0; k < 4; k++) sums.of[g][k][0] = sums.of[g][k][1] = sums.of[g][k][2] = sums.of[g][k][3] = 0;
    const int first = first_of(i_unit, chunks), end = first_of(i_unit + 1, chunks);
    if (i_unit < busy) {
      const int length = load(base + LENGTHS + 4);
#pragma unroll 1
      for (int i = i_unit; i < blocks; i += units) {
        const Loose loose = loose_of(args, i, row, sealed, length);
        if (i == i_unit) {
          wait(base + LOOSE_FULL + 8 * self.unit, 0);
        } else {
          meet(1 + self.unit, 128);
          copy_loose(args, loose, self.ring, self.warp, lane);
          copies_done();
          meet(1 + self.unit, 128);
        }
        attend_loose(sums, self, loose);
      }
      as_codes(sums);
      meet(1 + self.unit, 128);
    }
    if (lane >= (i_unit < busy ? EARLY : IN_FRONT) && lane < SLOTS) arrive(self.empty + 8 * lane);
    const u32 low = (lane & 15) * 256 + (((4 * self.warp + (lane >> 4)) ^ (lane & 7)) << 4);
    const u32 high = (lane & 15) * 256 + (((4 * self.warp + 2 + (lane >> 4)) ^ (lane & 7)) << 4);
    int slot = 0, turn = 0;  // of the step's first chunk; how often the ring has gone round
    // Two flags take turns: a warp ahead may raise the next one.
    u32 flag = base + FLAGS + 8 * self.unit;
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += 4, flag ^= 4) {
      const int here = end - chunk < 4 ? end - chunk : 4;
      if (self.warp < here) {
        int own = slot + self.warp, own_turn = turn;
        if (own >= SLOTS) {
          own -= SLOTS;
          own_turn++;
        }
        wait(self.full + 8 * own, own_turn & 1);
        probabilities(sums, self, self.ring + own * SLOT, sealed - (chunk + self.warp) * TOKENS, flag, chunk);
      }
      meet(1 + self.unit, 128);
      if (load(flag) == (u32)chunk) {
        move(sums, self, slot, here);
        meet(1 + self.unit, 128);
      }
#pragma unroll 1
      for (int i = 0; i < here; i++) {
        const u32 at = self.ring + slot * SLOT;
        add_tokens(sums, at + SLOT_ROTARY + lane * 16, at + low, at + high);
        meet_warp();
        if (lane == 0) arrive(self.empty + 8 * slot);
        if (++slot == SLOTS) {
          slot = 0;
          turn++;
        }
      }
    }
    meet(1 + self.unit, 128);
    hand_over(sums, self);
    meet(MEET_WORKERS, THREADS);
    const int w = thread_again() / WARP, l = thread_again() % WARP;
#pragma unroll 1
    for (int m = w; m < args.heads; m += THREADS / WARP) join_units(m, l);
    arrive_cluster();
    wait_cluster();
    const int own_split = split_of_block(), ranks = 1 << args.cluster, rank = own_split & (ranks - 1);
    const int most = (args.heads + ranks - 1) >> args.cluster, left = args.heads - rank * most;
    const Share share = {row_of_block(), rank * most, (left < most ? left : most) * SLICES, own_split >> args.cluster,
                         args.splits >> args.cluster};
    // Several items at a time where each is of few parts: they wait together.
    if (ranks <= 2) {
#pragma unroll 1
      for (int i = w; i < share.items; i += 16 * UNITS) join_cluster<2, 4>(args, share, i, l);
    } else {
#pragma unroll 1
      for (int i = w; i < share.items; i += 4 * UNITS) join_cluster<8, 1>(args, share, i, l);
    }
    // Other blocks may end: this one reads no more of them.
    arrive_cluster();
    if (share.groups > 1 && share.items > 0) {
      // The usual chain: all have put their parts and meet, one fences (release) and counts, and if it is the last fences
      // too (acquire) before all meet again and read, past the L1 cache. The counter is 0 again after the last: the next
      // launch, which waits for the end of this one before it counts, finds it so.
      meet(MEET_WORKERS, WORKERS);
      if (w + l == 0) {
        fence();
        const u32 before = come(args.arrived + (long long)share.row * ranks + rank, share.groups);
        fence();
        store(base + LENGTHS, before == (u32)share.groups - 1);
      }
      meet(MEET_WORKERS, WORKERS);
      if (load(base + LENGTHS)) {
        if (share.groups <= 4) {
#pragma unroll 1
          for (int i = w; i < share.items; i += 16 * UNITS) join_row<4, 4>(args, share, i, l);
        } else {
#pragma unroll 1
          for (int i = w; i < share.items; i += 4 * UNITS) join_row<16, 1>(args, share, i, l);
        }
      }
    }
    wait_cluster();
  }
}
