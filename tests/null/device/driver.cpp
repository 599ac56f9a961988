// libcuda.so.1 of the same device: for Triton, and what torch asks of the driver.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
extern "C" {
static void note(const char* s, void* st) {
  static void (*f)(const char*, void*) = (void (*)(const char*, void*))dlsym(RTLD_DEFAULT, "null_note");
  if (f)
    f(s, st);
}

static int current() {
  static int (*f)() = (int (*)())dlsym(RTLD_DEFAULT, "null_current");
  return f ? f() : 0;
}

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* n) {
  int (*f)(int*) = (int (*)(int*))dlsym(RTLD_DEFAULT, "cudaGetDeviceCount");
  if (f)
    f(n);
  else
    *n = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* d, int i) {
  *d = i;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* s, int n, CUdevice) {
  snprintf(s, n, "Null H100");
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) {
  int (*f)(int*, int, int) = (int (*)(int*, int, int))dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");
  if (f)
    f(v, a, d);
  else
    *v = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)(0x77000 + 16 * current());
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* d) {
  *d = current();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
  note("SYNC ctx", 0);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  *c = (CUcontext)(size_t)(0x77000 + 16 * d);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
  if (f)
    *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}

static std::map<std::string, std::string*> known;

CUresult cuModuleLoadData(CUmodule* m, const void*) {
  *m = (CUmodule)0x5500;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) {
  *m = (CUmodule)0x5500;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule* m, const char*) {
  *m = (CUmodule)0x5500;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule) {
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char* name) {
  auto*& s = known[name];
  if (!s)
    s = new std::string(std::string("triton ") + name);
  *f = (CUfunction)s;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned, unsigned, unsigned, unsigned,
                        CUstream s, void**, void**) {
  if (!gx || !gy || !gz || gy > 65535 || gz > 65535) {
    note("BAD LAUNCH triton", 0);
    return CUDA_ERROR_INVALID_VALUE;
  }
  note(((std::string*)f)->c_str(), s);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  if (!c->gridDimX || !c->gridDimY || !c->gridDimZ || c->gridDimY > 65535 || c->gridDimZ > 65535) {
    note("BAD LAUNCH triton", 0);
    return CUDA_ERROR_INVALID_VALUE;
  }
  note(((std::string*)f)->c_str(), c->hStream);
  return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream s, void**) {
  note(((std::string*)f)->c_str(), s);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* v, CUpointer_attribute, CUdeviceptr p) {
  *(CUdeviceptr*)v = p;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned, CUpointer_attribute*, void**, CUdeviceptr) {
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** s) {
  *s = "null driver error";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult, const char** s) {
  *s = "null driver error";
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 1;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

static CUresult nothing() {
  return CUDA_ERROR_NOT_SUPPORTED;
}

void* null_driver_symbol(const char* s) {
  void* f = dlsym(RTLD_DEFAULT, s);
  if (!f) {
    void* me = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    f = me ? dlsym(me, s) : nullptr;
  }
  return f ? f : (void*)nothing;
}

CUresult cuGetProcAddress_v2(const char* s, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* r) {
  *f = null_driver_symbol(s);
  if (r)
    *r = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
}
