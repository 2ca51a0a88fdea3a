// latent.cu on a CPU.
#include "emulation.h"
#include "latent.cu"

extern "C" const char* run(const Arguments* arguments, int splits, int rows, int cluster, int backwards) {
  return emulate<Arguments>(latent_attention, *arguments, splits, rows, cluster, THREADS, backwards);
}
extern "C" int size_of_arguments() { return sizeof(Arguments); }
extern "C" int bytes_shared() { return SHARED; }
