/* Calls functions of a library for far_kernels.py, on another processor or its emulator.
 *
 *   far_kernels LIBRARY FILE_DESCRIPTOR ADDRESS BYTES
 *
 * Both processes map the file at ADDRESS, so that pointers into it are valid in both. Reads calls from the
 * standard input and writes their results, int32, to the standard output.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

struct call {
  char name[16];
  int64_t arguments[9]; /* integers and pointers: both ABIs pass each as 64 bits */
};

typedef int32_t function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

int main(int count, char **words) {
  if (count != 5) return 2;
  void *at = (void *)strtoull(words[3], 0, 10), *library = dlopen(words[1], RTLD_NOW);
  size_t bytes = strtoull(words[4], 0, 10);
  if (!library) return fprintf(stderr, "%s\n", dlerror());
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, atoi(words[2]), 0) != at) perror("mmap");
  struct call call;
  while (fread(&call, sizeof call, 1, stdin)) {
    int64_t *a = call.arguments;
    function *called = (function *)dlsym(library, call.name);
    int32_t result = called(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
  }
  return 0;
}
