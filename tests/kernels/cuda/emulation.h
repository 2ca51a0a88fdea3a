// What latent.cu needs of a GPU, on a CPU: a cluster's threads are fibers that run by turns, and instructions of a warp
// are done by the last of its lanes to come. Copies are done at once, so that nothing is seen of races.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EMULATED
#define DEVICE static inline
#define GLOBAL static
#define __launch_bounds__(...)
#define __grid_constant__

using Word = std::uint32_t;
struct Pair { float x, y; };
// Begins by its context and goes on where it jumped away: to swap contexts asks the system for signals each time.
struct Fiber {
  ucontext_t context;
  jmp_buf left;
  char* stack = nullptr;
  bool begun = false, done = false;
  const long* watched = nullptr;  // What has to be other than `seen` before there is anything to do.
  long cluster = 0, seen = 0;
};
struct Warp { int arrived = 0, what = 0; long generation = 0; Word in[32][6], out[32][4]; };
struct Meeting { int arrived = 0; long generation = 0; };
struct Machine {
  std::vector<Fiber> fibers;
  jmp_buf scheduler;
  int current = 0, row = 0, first = 0, threads = 0;  // first: split of the cluster
  const char* error = nullptr;
  Warp warps[8 * 32];
  Meeting meetings[8][16], cluster;
  int running[8];
  alignas(16) unsigned char shared[8][240 * 1024];
};
static Machine machine;

DEVICE int thread() { return machine.current % machine.threads; }
DEVICE int thread_again() { return thread(); }
DEVICE int own_rank() { return machine.current / machine.threads; }
DEVICE int split_of_block() { return machine.first + own_rank(); }
DEVICE int row_of_block() { return machine.row; }
DEVICE Fiber& own_fiber() { return machine.fibers[machine.current]; }
DEVICE void next() {
  if (!_setjmp(own_fiber().left)) _longjmp(machine.scheduler, 1);
}
DEVICE void wait_for_change(const long& watched, long seen) {
  own_fiber().watched = &watched;
  own_fiber().seen = seen;
  while (watched == seen) next();
  own_fiber().watched = nullptr;
}
// Until it waits for another or has done all.
DEVICE void go_on(Fiber& fiber) {
  if (fiber.watched && *fiber.watched == fiber.seen) return;
  if (_setjmp(machine.scheduler)) return;
  if (fiber.begun) _longjmp(fiber.left, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}
DEVICE void fail(const char* what) {
  if (!machine.error) machine.error = what;
  _longjmp(machine.scheduler, 1);
}
DEVICE Word shared() { return 1024; }
// The upper byte tells other blocks of the cluster from the own one.
DEVICE unsigned char* at_shared(Word at, int bytes) {
  const int rank = at >> 24 ? (int)(at >> 24) - 1 : own_rank();
  at &= 0xffffff;
  if (at % bytes || at < 1024 || at + bytes > sizeof machine.shared[0] || rank > 7) fail("shared memory: a bad address");
  return machine.shared[rank] + at;
}

// Instructions of a warp: `done` runs once, when all lanes have come.
template <class Done> void together(int what, Done done) {
  Warp& warp = machine.warps[machine.current / 32];
  if (warp.arrived && warp.what != what) fail("lanes of a warp are at different instructions");
  warp.what = what;
  const long generation = warp.generation;
  if (++warp.arrived == 32) {
    done(warp);
    warp.arrived = 0;
    warp.generation++;
  } else {
    wait_for_change(warp.generation, generation);
  }
}
DEVICE Warp& own_warp() { return machine.warps[machine.current / 32]; }
DEVICE int own_lane() { return thread() % 32; }

template <class To, class From> To cast(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "of one size");
  std::memcpy(&y, &x, sizeof y);
  return y;
}
DEVICE float from_half_bits(std::uint16_t x) { return (float)cast<_Float16>(x); }
DEVICE std::uint16_t half_bits(float x) { return cast<std::uint16_t>((_Float16)x); }
DEVICE float from_bfloat_bits(std::uint16_t x) { return cast<float>((Word)x << 16); }
DEVICE std::uint16_t bfloat_bits(float x) {
  const Word y = cast<Word>(x);
  return (y + 0x7fff + (y >> 16 & 1)) >> 16;
}

template <bool BF> void product(float (&c)[4], const Word (&a)[4], Word b0, Word b1) {
  Warp& warp = own_warp();
  const int lane = own_lane();
  for (int i = 0; i < 4; i++) warp.in[lane][i] = a[i];
  warp.in[lane][4] = b0;
  warp.in[lane][5] = b1;
  together(BF ? 1 : 2, [](Warp& w) {
    auto number = [](Word x, int h) {
      const std::uint16_t y = x >> (16 * h);
      return BF ? from_bfloat_bits(y) : from_half_bits(y);
    };
    float A[16][16], B[16][8];
    for (int lane = 0; lane < 32; lane++)
      for (int h = 0, r = lane / 4, k = lane % 4 * 2; h < 2; h++) {
        for (int i = 0; i < 4; i++) A[r + i % 2 * 8][k + h + i / 2 * 8] = number(w.in[lane][i], h);
        for (int i = 0; i < 2; i++) B[k + h + i * 8][r] = number(w.in[lane][4 + i], h);
      }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += A[lane / 4 + i / 2 * 8][k] * B[k][lane % 4 * 2 + i % 2];
        w.out[lane][i] = cast<Word>(sum);
      }
  });
  for (int i = 0; i < 4; i++) c[i] += cast<float>(warp.out[lane][i]);
}
DEVICE void mma_f16(float (&c)[4], const Word (&a)[4], Word b0, Word b1) { product<false>(c, a, b0, b1); }
DEVICE void mma_bf16(float (&c)[4], const Word (&a)[4], Word b0, Word b1) { product<true>(c, a, b0, b1); }

template <bool TURNED> void matrices(Word (&a)[4], Word at) {
  Warp& warp = own_warp();
  const int lane = own_lane();
  warp.in[lane][0] = at;
  together(TURNED ? 3 : 4, [](Warp& w) {
    for (int m = 0; m < 4; m++) {
      std::uint16_t x[8][8];
      for (int i = 0; i < 8; i++) std::memcpy(x[i], at_shared(w.in[8 * m + i][0], 16), 16);
      for (int lane = 0; lane < 32; lane++) {
        const int r = lane / 4, k = lane % 4 * 2;
        w.out[lane][m] = TURNED ? x[k][r] | (Word)x[k + 1][r] << 16 : x[r][k] | (Word)x[r][k + 1] << 16;
      }
    }
  });
  for (int i = 0; i < 4; i++) a[i] = warp.out[lane][i];
}
DEVICE void load_matrices(Word (&a)[4], Word at) { matrices<false>(a, at); }
DEVICE void load_turned(Word (&a)[4], Word at) { matrices<true>(a, at); }

DEVICE Word load(Word at) { return *(Word*)at_shared(at, 4); }
DEVICE float load_f(Word at) { return *(float*)at_shared(at, 4); }
DEVICE void load4(Word (&a)[4], Word at) { std::memcpy(a, at_shared(at, 16), 16); }
DEVICE void load4_f(float (&a)[4], Word at) { std::memcpy(a, at_shared(at, 16), 16); }
DEVICE void load2_f(float& a, float& b, Word at) {
  const float* x = (float*)at_shared(at, 8);
  a = x[0];
  b = x[1];
}
DEVICE void store4_f(Word at, float a, float b, float c, float d) {
  const float x[4] = {a, b, c, d};
  std::memcpy(at_shared(at, 16), x, 16);
}
DEVICE Word of_block(Word at, int rank) {
  if ((rank + 1) * machine.threads > (int)machine.fibers.size()) fail("shared memory: no such block");
  return at | (Word)(rank + 1) << 24;
}
DEVICE float load_far(Word at) { return load_f(at); }
DEVICE void load4_far(float (&a)[4], Word at) { load4_f(a, at); }
DEVICE void store(Word at, Word x) { *(Word*)at_shared(at, 4) = x; }
DEVICE void store_f(Word at, float x) { *(float*)at_shared(at, 4) = x; }
DEVICE void store2_f(Word at, float x, float y) {
  float* to = (float*)at_shared(at, 8);
  to[0] = x;
  to[1] = y;
}
DEVICE void store4(Word at, Word a, Word b, Word c, Word d) {
  const Word x[4] = {a, b, c, d};
  std::memcpy(at_shared(at, 16), x, 16);
}
DEVICE void copy_or_zero(Word to, const void* from, bool there) {
  if ((std::uintptr_t)from % 16) fail("global memory: copies are of aligned addresses");
  if (there) std::memcpy(at_shared(to, 16), from, 16);
  else std::memset(at_shared(to, 16), 0, 16);
}
DEVICE void copy(Word to, const void* from) { copy_or_zero(to, from, true); }
DEVICE void copies_done() {}

// Phases that are over, those still to arrive in this one, and how many a phase has.
struct Phases { Word over; std::uint16_t left, all; };
DEVICE Phases& phases(Word at) { return *(Phases*)at_shared(at, 8); }
DEVICE void barrier_of(Word barrier, Word count) { phases(barrier) = {0, (std::uint16_t)count, (std::uint16_t)count}; }
DEVICE void arrive(Word barrier) {
  Phases& x = phases(barrier);
  if (--x.left == 0) {
    x.over++;
    x.left = x.all;
  }
}
DEVICE void arrive_when_copied(Word barrier) { arrive(barrier); }
DEVICE void wait(Word barrier, Word parity) {
  while ((phases(barrier).over & 1) == parity) next();
}
DEVICE void meet(int which, int threads) {
  Meeting& meeting = machine.meetings[own_rank()][which];
  const long generation = meeting.generation;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    meeting.generation++;
  } else {
    wait_for_change(meeting.generation, generation);
  }
}
DEVICE void come_to_meet(int which, int threads) {
  Meeting& meeting = machine.meetings[own_rank()][which];
  if (++meeting.arrived < threads) return;
  meeting.arrived = 0;
  meeting.generation++;
}
DEVICE void meet_block() { meet(0, machine.threads); }
DEVICE void arrive_cluster() {
  own_fiber().cluster = machine.cluster.generation;
  if (++machine.cluster.arrived == (int)machine.fibers.size()) {
    machine.cluster.arrived = 0;
    machine.cluster.generation++;
  }
}
DEVICE void wait_cluster() {
  wait_for_change(machine.cluster.generation, own_fiber().cluster);
}
DEVICE void meet_warp() {
  together(5, [](Warp&) {});
}
template <int N> void more_registers() {}
template <int N> void fewer_registers() {}
DEVICE float from_lane(float x, int mask) {
  Warp& warp = own_warp();
  const int lane = own_lane();
  warp.in[lane][0] = cast<Word>(x);
  together(6, [](Warp& w) {
    for (int i = 0; i < 32; i++) w.out[i][0] = w.in[i][0];
  });
  const Word found = warp.out[lane ^ mask][0];
  // Nobody goes on before all have read.
  meet_warp();
  return cast<float>(found);
}
DEVICE Word of_each(bool p) {
  Warp& warp = own_warp();
  warp.in[own_lane()][0] = p;
  together(7, [](Warp& w) {
    Word all = 0;
    for (int i = 0; i < 32; i++) all |= w.in[i][0] << i;
    for (int i = 0; i < 32; i++) w.out[i][0] = all;
  });
  return warp.out[own_lane()][0];
}
DEVICE bool of_any(bool p) { return of_each(p); }
DEVICE float power_of_two(float x) { return std::exp2(x); }
DEVICE Word to_f16(float low, float high) { return half_bits(low) | (Word)half_bits(high) << 16; }
DEVICE Word to_bf16(float low, float high) { return bfloat_bits(low) | (Word)bfloat_bits(high) << 16; }
DEVICE Pair from_f16(Word x) { return {from_half_bits(x), from_half_bits(x >> 16)}; }
DEVICE Pair from_bf16(Word x) { return {from_bfloat_bits(x), from_bfloat_bits(x >> 16)}; }
DEVICE float of_e4m3(Word x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float size = (x & 127) == 127 ? NAN : std::ldexp(exponent ? 8 + mantissa : mantissa, exponent ? exponent - 10 : -9);
  return x & 128 ? -size : size;
}
DEVICE void from_e4m3(Word x, Word& low, Word& high) {
  low = to_f16(of_e4m3(x & 255), of_e4m3(x >> 8 & 255));
  high = to_f16(of_e4m3(x >> 16 & 255), of_e4m3(x >> 24));
}
DEVICE Word times(Word a, Word b) {
  const Pair x = from_f16(a), y = from_f16(b);
  return to_f16(x.x * y.x, x.y * y.y);
}
DEVICE Word bytes_of(Word x, Word which) {
  Word y = 0;
  for (int i = 0; i < 4; i++) {
    const Word from = which >> (4 * i) & 7;
    y |= (from < 4 ? x >> (8 * from) & 255 : 0) << (8 * i);
  }
  return y;
}
DEVICE Word fetch(const void* p) { return *(const Word*)p; }
DEVICE Word fetch_half(const void* p) { return *(const std::uint16_t*)p; }
DEVICE float fetch_f(const void* p) { return *(const float*)p; }
DEVICE void fetch4_f(float (&a)[4], const float* p) { std::memcpy(a, p, 16); }
DEVICE void fetch2_f(float& a, float& b, const float* p) {
  a = p[0];
  b = p[1];
}
DEVICE void prefetch(const void*) {}
DEVICE void fence() {}
DEVICE Word come(Word* counter, Word count) {
  const Word before = *counter;
  *counter = before >= count - 1 ? 0 : before + 1;
  return before;
}
DEVICE void put2(void* p, Word a, Word b) {
  const Word x[2] = {a, b};
  std::memcpy(p, x, 8);
}
DEVICE void put2_f(float* p, float a, float b) {
  p[0] = a;
  p[1] = b;
}
DEVICE void put4(float* p, float a, float b, float c, float d) {
  p[0] = a;
  p[1] = b;
  p[2] = c;
  p[3] = d;
}
DEVICE void wait_for_grid() {}
DEVICE void stay() {}
DEVICE const unsigned char* as_it_is(const unsigned char* p) { return p; }
DEVICE float infinity() { return INFINITY; }

// Runs clusters of a kernel one after the other, or from the last to the first, and so their threads. Returns what went
// wrong, or null.
template <class Arguments>
const char* emulate(void (*kernel)(const Arguments), const Arguments& arguments, int splits, int rows, int cluster,
                    int threads, bool backwards) {
  static void (*entry)(const Arguments);
  static const Arguments* given;
  entry = kernel;
  given = &arguments;
  machine.error = nullptr;
  machine.threads = threads;
  machine.fibers.resize(threads * cluster);
  const int clusters = splits / cluster;
  for (int i = 0; i < clusters * rows; i++) {
    const int own = backwards ? clusters * rows - 1 - i : i;
    machine.row = own / clusters;
    machine.first = own % clusters * cluster;
    // NaN, as numbers go.
    std::memset(machine.shared, 0xff, sizeof machine.shared);
    for (Warp& warp : machine.warps) warp.arrived = 0;
    for (auto& block : machine.meetings)
      for (Meeting& meeting : block) meeting.arrived = 0;
    machine.cluster.arrived = 0;
    for (int& running : machine.running) running = threads;
    for (Fiber& fiber : machine.fibers) {
      if (!fiber.stack) fiber.stack = (char*)std::malloc(1 << 16);
      fiber.begun = fiber.done = false;
      fiber.watched = nullptr;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack;
      fiber.context.uc_stack.ss_size = 1 << 16;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, +[] {
        entry(*given);
        own_fiber().done = true;
        // What a block held is lost with it.
        if (--machine.running[own_rank()] == 0) std::memset(machine.shared[own_rank()], 0xff, sizeof machine.shared[0]);
        next();
      }, 0);
    }
    long rounds = 0;
    for (bool more = true; more;) {
      more = false;
      for (int i = 0, all = threads * cluster; i < all; i++) {
        machine.current = backwards ? all - 1 - i : i;
        if (!machine.fibers[machine.current].done) {
          more = true;
          go_on(machine.fibers[machine.current]);
          if (machine.error) return machine.error;
        }
      }
      if (++rounds > 1000000) return "threads wait for each other";
    }
  }
  return nullptr;
}
