// latent.cu on a CPU.
#include "emulation.h"
#include "latent.cu"

extern "C" const char* run(const Arguments* arguments, int blocks) {
  return emulate<Arguments>(latent_attention, *arguments, blocks, THREADS);
}
extern "C" int size_of_arguments() { return sizeof(Arguments); }
extern "C" int bytes_shared() { return SHARED; }
