#include <dlfcn.h>

extern "C" void* dlsym_here(const char* s) {
  static void* me = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!me)
    return nullptr;
  static void* (*f)(const char*) = (void* (*)(const char*))dlsym(me, "null_driver_symbol");
  return f(s);
}
