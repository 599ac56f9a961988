// The calls of the CUDA runtime, cuBLAS and cuDNN that need no logic: what torch makes of them is counted, or passed over.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void null_note(const char* name, void* stream);

// Of cudnn_graph.h.
enum { CUDNN_TYPE_INT64 = 3, CUDNN_ATTR_ENGINEHEUR_RESULTS = 202, CUDNN_ATTR_ENGINECFG_ENGINE = 300 };

// A call whose effect is unknown here. The tests fail where it is made.
#define UNKNOWN(call) int call(void) { null_note("DEFAULT " #call, 0); return 0; }
// A call that changes nothing that matters without a device.
#define EMPTY(call) int call(void) { return 0; }
// A call that launches kernels. A handle of cuBLAS or cuDNN holds its stream.
#define LAUNCH(call) int call(void* handle) { null_note(#call, *(void**)handle); return 0; }

// clang-format off
UNKNOWN(cudaDeviceEnablePeerAccess)
UNKNOWN(cudaDeviceGetDefaultMemPool)
UNKNOWN(cudaDeviceGetGraphMemAttribute)
UNKNOWN(cudaDeviceSetGraphMemAttribute)
EMPTY(cudaFuncSetAttribute)
UNKNOWN(cudaGraphAddNode)
UNKNOWN(cudaGraphConditionalHandleCreate)
UNKNOWN(cudaGraphNodeGetDependencies)
UNKNOWN(cudaGraphRetainUserObject)
UNKNOWN(cudaIpcCloseMemHandle)
UNKNOWN(cudaIpcGetEventHandle)
UNKNOWN(cudaIpcGetMemHandle)
UNKNOWN(cudaIpcOpenEventHandle)
UNKNOWN(cudaIpcOpenMemHandle)
UNKNOWN(cudaKernelSetAttributeForDevice)
UNKNOWN(cudaLibraryGetKernel)
UNKNOWN(cudaLibraryLoadData)
UNKNOWN(cudaLibraryUnload)
UNKNOWN(cudaMemPoolGetAttribute)
UNKNOWN(cudaMemPoolSetAccess)
UNKNOWN(cudaMemPoolSetAttribute)
UNKNOWN(cudaMemPoolTrimTo)
UNKNOWN(cudaProfilerStart)
UNKNOWN(cudaProfilerStop)
UNKNOWN(cudaStreamBeginCaptureToGraph)
UNKNOWN(cudaStreamUpdateCaptureDependencies)
UNKNOWN(cudaUserObjectCreate)
UNKNOWN(cudaUserObjectRelease)

EMPTY(cublasCcopy_v2)
EMPTY(cublasCher2_v2)
EMPTY(cublasCher2k_v2)
EMPTY(cublasCher_v2)
EMPTY(cublasCherk_v2)
EMPTY(cublasCrot_v2)
EMPTY(cublasCrotg_v2)
EMPTY(cublasCsrot_v2)
EMPTY(cublasCswap_v2)
EMPTY(cublasCsymm_v2)
EMPTY(cublasCsymv_v2)
EMPTY(cublasCsyr2_v2)
EMPTY(cublasCsyr2k_v2)
EMPTY(cublasCsyr_v2)
EMPTY(cublasCsyrk_v2)
EMPTY(cublasCtrmm_v2)
EMPTY(cublasCtrmv_v2)
EMPTY(cublasCtrsv_v2)
EMPTY(cublasDasum_v2)
EMPTY(cublasDcopy_v2)
EMPTY(cublasDestroy_v2)
EMPTY(cublasDnrm2_v2)
EMPTY(cublasDrot_v2)
EMPTY(cublasDrotg_v2)
EMPTY(cublasDrotm_v2)
EMPTY(cublasDrotmg_v2)
EMPTY(cublasDswap_v2)
EMPTY(cublasDsymm_v2)
EMPTY(cublasDsymv_v2)
EMPTY(cublasDsyr2_v2)
EMPTY(cublasDsyr2k_v2)
EMPTY(cublasDsyr_v2)
EMPTY(cublasDsyrk_v2)
EMPTY(cublasDtrmm_v2)
EMPTY(cublasDtrmv_v2)
EMPTY(cublasDtrsv_v2)
EMPTY(cublasDzasum_v2)
EMPTY(cublasDznrm2_v2)
EMPTY(cublasGetMatrixAsync)
EMPTY(cublasGetVectorAsync)
EMPTY(cublasIcamax_v2)
EMPTY(cublasIcamin_v2)
EMPTY(cublasIdamax_v2)
EMPTY(cublasIdamin_v2)
EMPTY(cublasIsamax_v2)
EMPTY(cublasIsamin_v2)
EMPTY(cublasIzamax_v2)
EMPTY(cublasIzamin_v2)
EMPTY(cublasLtMatmulAlgoCheck)
EMPTY(cublasLtMatmulAlgoConfigGetAttribute)
EMPTY(cublasLtMatmulAlgoConfigSetAttribute)
EMPTY(cublasLtMatmulAlgoInit)
EMPTY(cublasLtMatmulDescDestroy)
EMPTY(cublasLtMatmulDescSetAttribute)
EMPTY(cublasLtMatmulPreferenceDestroy)
EMPTY(cublasLtMatmulPreferenceSetAttribute)
EMPTY(cublasLtMatrixLayoutDestroy)
EMPTY(cublasLtMatrixLayoutSetAttribute)
EMPTY(cublasSasum_v2)
EMPTY(cublasScasum_v2)
EMPTY(cublasScnrm2_v2)
EMPTY(cublasScopy_v2)
EMPTY(cublasSetMathMode)
EMPTY(cublasSetMatrixAsync)
EMPTY(cublasSetPointerMode_v2)
EMPTY(cublasSetSmCountTarget)
EMPTY(cublasSetVectorAsync)
EMPTY(cublasSetWorkspace_v2)
EMPTY(cublasSnrm2_v2)
EMPTY(cublasSrot_v2)
EMPTY(cublasSrotg_v2)
EMPTY(cublasSrotm_v2)
EMPTY(cublasSrotmg_v2)
EMPTY(cublasSswap_v2)
EMPTY(cublasSsymm_v2)
EMPTY(cublasSsymv_v2)
EMPTY(cublasSsyr2_v2)
EMPTY(cublasSsyr2k_v2)
EMPTY(cublasSsyr_v2)
EMPTY(cublasSsyrk_v2)
EMPTY(cublasStrmm_v2)
EMPTY(cublasStrmv_v2)
EMPTY(cublasStrsv_v2)
EMPTY(cublasZcopy_v2)
EMPTY(cublasZdrot_v2)
EMPTY(cublasZher2_v2)
EMPTY(cublasZher2k_v2)
EMPTY(cublasZher_v2)
EMPTY(cublasZherk_v2)
EMPTY(cublasZrot_v2)
EMPTY(cublasZrotg_v2)
EMPTY(cublasZswap_v2)
EMPTY(cublasZsymm_v2)
EMPTY(cublasZsymv_v2)
EMPTY(cublasZsyr2_v2)
EMPTY(cublasZsyr2k_v2)
EMPTY(cublasZsyr_v2)
EMPTY(cublasZsyrk_v2)
EMPTY(cublasZtrmm_v2)
EMPTY(cublasZtrmv_v2)
EMPTY(cublasZtrsv_v2)
EMPTY(cudnnBackendFinalize)
EMPTY(cudnnBackendSetAttribute)
EMPTY(cudnnDestroyActivationDescriptor)
EMPTY(cudnnDestroyCTCLossDescriptor)
EMPTY(cudnnDestroyConvolutionDescriptor)
EMPTY(cudnnDestroyDropoutDescriptor)
EMPTY(cudnnDestroyFilterDescriptor)
EMPTY(cudnnDestroyRNNDataDescriptor)
EMPTY(cudnnDestroyRNNDescriptor)
EMPTY(cudnnDestroySpatialTransformerDescriptor)
EMPTY(cudnnDestroyTensorDescriptor)
EMPTY(cudnnFindConvolutionBackwardDataAlgorithmEx)
EMPTY(cudnnFindConvolutionBackwardFilterAlgorithmEx)
EMPTY(cudnnFindConvolutionForwardAlgorithmEx)
EMPTY(cudnnGetFilterNdDescriptor)
EMPTY(cudnnRestoreDropoutDescriptor)
EMPTY(cudnnSetActivationDescriptor)
EMPTY(cudnnSetCTCLossDescriptorEx)
EMPTY(cudnnSetCTCLossDescriptor_v9)
EMPTY(cudnnSetConvolutionGroupCount)
EMPTY(cudnnSetConvolutionMathType)
EMPTY(cudnnSetConvolutionNdDescriptor)
EMPTY(cudnnSetDropoutDescriptor)
EMPTY(cudnnSetFilterNdDescriptor)
EMPTY(cudnnSetPooling2dDescriptor)
EMPTY(cudnnSetRNNDataDescriptor)
EMPTY(cudnnSetSpatialTransformerNdDescriptor)
EMPTY(cudnnSetTensorNdDescriptor)

LAUNCH(cublasCaxpy_v2)
LAUNCH(cublasCdotc_v2)
LAUNCH(cublasCdotu_v2)
LAUNCH(cublasCgelsBatched)
LAUNCH(cublasCgemmBatched)
LAUNCH(cublasCgemmStridedBatched)
LAUNCH(cublasCgemm_v2)
LAUNCH(cublasCgemv_v2)
LAUNCH(cublasCgeqrfBatched)
LAUNCH(cublasCgerc_v2)
LAUNCH(cublasCgeru_v2)
LAUNCH(cublasCgetrfBatched)
LAUNCH(cublasCgetrsBatched)
LAUNCH(cublasChemm_v2)
LAUNCH(cublasChemv_v2)
LAUNCH(cublasCscal_v2)
LAUNCH(cublasCsscal_v2)
LAUNCH(cublasCtrsmBatched)
LAUNCH(cublasCtrsm_v2)
LAUNCH(cublasDaxpy_v2)
LAUNCH(cublasDdot_v2)
LAUNCH(cublasDgelsBatched)
LAUNCH(cublasDgemmBatched)
LAUNCH(cublasDgemmStridedBatched)
LAUNCH(cublasDgemm_v2)
LAUNCH(cublasDgemv_v2)
LAUNCH(cublasDgeqrfBatched)
LAUNCH(cublasDger_v2)
LAUNCH(cublasDgetrfBatched)
LAUNCH(cublasDgetrsBatched)
LAUNCH(cublasDotEx)
LAUNCH(cublasDscal_v2)
LAUNCH(cublasDtrsmBatched)
LAUNCH(cublasDtrsm_v2)
LAUNCH(cublasGemmEx)
LAUNCH(cublasGemmStridedBatchedEx)
LAUNCH(cublasSaxpy_v2)
LAUNCH(cublasSdot_v2)
LAUNCH(cublasSgelsBatched)
LAUNCH(cublasSgemmBatched)
LAUNCH(cublasSgemmEx)
LAUNCH(cublasSgemmStridedBatched)
LAUNCH(cublasSgemm_v2)
LAUNCH(cublasSgemv_v2)
LAUNCH(cublasSgeqrfBatched)
LAUNCH(cublasSger_v2)
LAUNCH(cublasSgetrfBatched)
LAUNCH(cublasSgetrsBatched)
LAUNCH(cublasSscal_v2)
LAUNCH(cublasStrsmBatched)
LAUNCH(cublasStrsm_v2)
LAUNCH(cublasZaxpy_v2)
LAUNCH(cublasZdotc_v2)
LAUNCH(cublasZdotu_v2)
LAUNCH(cublasZdscal_v2)
LAUNCH(cublasZgelsBatched)
LAUNCH(cublasZgemmBatched)
LAUNCH(cublasZgemmStridedBatched)
LAUNCH(cublasZgemm_v2)
LAUNCH(cublasZgemv_v2)
LAUNCH(cublasZgeqrfBatched)
LAUNCH(cublasZgerc_v2)
LAUNCH(cublasZgeru_v2)
LAUNCH(cublasZgetrfBatched)
LAUNCH(cublasZgetrsBatched)
LAUNCH(cublasZhemm_v2)
LAUNCH(cublasZhemv_v2)
LAUNCH(cublasZscal_v2)
LAUNCH(cublasZtrsmBatched)
LAUNCH(cublasZtrsm_v2)
LAUNCH(cudnnBackendExecute)
LAUNCH(cudnnBatchNormalizationBackwardEx)
LAUNCH(cudnnBatchNormalizationForwardInference)
LAUNCH(cudnnBatchNormalizationForwardTrainingEx)
LAUNCH(cudnnCTCLoss)
LAUNCH(cudnnCTCLoss_v8)
LAUNCH(cudnnConvolutionBackwardData)
LAUNCH(cudnnConvolutionBackwardFilter)
LAUNCH(cudnnConvolutionBiasActivationForward)
LAUNCH(cudnnConvolutionForward)
LAUNCH(cudnnPoolingForward)
LAUNCH(cudnnRNNBackwardData_v8)
LAUNCH(cudnnRNNBackwardWeights_v8)
LAUNCH(cudnnRNNForward)
LAUNCH(cudnnSpatialTfGridGeneratorBackward)
LAUNCH(cudnnSpatialTfGridGeneratorForward)
LAUNCH(cudnnSpatialTfSamplerBackward)
LAUNCH(cudnnSpatialTfSamplerForward)
// clang-format on

typedef struct {
  int type, n, dim[8];
} Tensor;

typedef struct {
  int mode, bias, dir, type, in, hid, proj, layers;
} Recurrent;

static int gates(Recurrent* r) {
  return r->mode == 2 ? 4 : r->mode == 3 ? 3 : 1;
}

static size_t width(Recurrent* r) {
  return r->type == 0 ? 4 : r->type == 1 ? 8 : 2;
}

static size_t mats(Recurrent* r, int pl, int lin) {
  size_t n = 0;
  int g = gates(r), dirs = r->dir + 1;
  for (int l = 0; l < r->layers * dirs; l++)
    for (int k = 0; k < 2 * g; k++) {
      if (l == pl && k == lin) return n;
      n += (size_t)r->hid * (k < g ? (l / dirs ? (size_t)r->hid * dirs : r->in) : r->hid);
    }
  return n;
}

int cublasCreate_v2(void** h) {
  *h = malloc(64);
  return 0;
}

int cublasGetMathMode(void* h, int* m) {
  *m = 0;
  return 0;
}

int cublasGetPointerMode_v2(void* h, int* m) {
  *m = 0;
  return 0;
}

size_t cublasLtGetVersion(void) {
  return 130101;
}

int cublasLtMatmul(void* h, void* d, void* al, void* A, void* Ad, void* B, void* Bd, void* be, void* C, void* Cd,
                   void* D, void* Dd, void* algo, void* ws, size_t wss, void* st) {
  null_note("cublasLtMatmul", st);
  return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void* a, void* b, void* c, void* d, void* e, void* f, void* g, int n, void* r,
                                   int* got) {
  memset(r, 0, 64);
  *got = 1;
  return 0;
}

int cublasLtMatmulDescCreate(void** p, int a, int b) {
  *p = malloc(64);
  return 0;
}

int cublasLtMatmulPreferenceCreate(void** p) {
  *p = malloc(64);
  return 0;
}

int cublasLtMatrixLayoutCreate(void** p, int a, long b, long c, long d) {
  *p = malloc(64);
  return 0;
}

int cublasSetStream_v2(void* h, void* s) {
  *(void**)h = s;
  return 0;
}

int cudnnCreate(void** h) {
  *h = malloc(64);
  *(void**)*h = 0;
  return 0;
}

int cudnnCreateActivationDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateCTCLossDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateConvolutionDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateDropoutDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateFilterDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreatePoolingDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateRNNDataDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateRNNDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateSpatialTransformerDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnCreateTensorDescriptor(void** p) {
  *p = calloc(1, 256);
  return 0;
}

int cudnnDropoutGetStatesSize(void* h, size_t* n) {
  *n = 4096;
  return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void* h, int m, int o, void* a, void* b, void* c, void* d,
                                                      void* e, void* f, void* g, size_t* n) {
  *n = 0;
  return 0;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void* h, int m, int o, void* a, void* b, void* c, void* d,
                                                             void* e, size_t* n) {
  *n = 0;
  return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void* h, int m, int o, void* a, void* b, size_t* n) {
  *n = 512;
  return 0;
}

int cudnnBackendCreateDescriptor(int kind, void** d) {
  *d = calloc(1, 64);
  return 0;
}

int cudnnBackendDestroyDescriptor(void* d) {
  free(d);
  return 0;
}

// There is one engine for each graph of operations. It has neither knobs nor notes, and needs no memory.
int cudnnBackendGetAttribute(void* d, int name, int type, int64_t most, int64_t* count, void* values) {
  int one = name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE || type == CUDNN_TYPE_INT64;
  if (count) *count = one;
  if (type == CUDNN_TYPE_INT64 && most) *(int64_t*)values = 0;
  return 0;
}

int cudnnGetCTCLossWorkspaceSize(void* a) {
  null_note("DEFAULT cudnnGetCTCLossWorkspaceSize", 0);
  return 9;
}

int cudnnGetCTCLossWorkspaceSize_v8(void* a) {
  null_note("DEFAULT cudnnGetCTCLossWorkspaceSize_v8", 0);
  return 9;
}

int cudnnGetConvolutionBackwardDataAlgorithm_v7(void* h, void* a, void* b, void* c, void* d, int n, int* got, int* r) {
  memset(r, 0, 48);
  r[0] = 1;
  *got = 1;
  return 0;
}

int cudnnGetConvolutionBackwardDataWorkspaceSize(void* h, void* a, void* b, void* c, void* d, int e, size_t* n) {
  *n = 0;
  return 0;
}

int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void* h, void* a, void* b, void* c, void* d, int n, int* got,
                                                  int* r) {
  memset(r, 0, 48);
  r[0] = 1;
  *got = 1;
  return 0;
}

int cudnnGetConvolutionBackwardFilterWorkspaceSize(void* h, void* a, void* b, void* c, void* d, int e, size_t* n) {
  *n = 0;
  return 0;
}

int cudnnGetConvolutionForwardAlgorithm_v7(void* h, void* a, void* b, void* c, void* d, int n, int* got, int* r) {
  memset(r, 0, 48);
  r[0] = 1;
  *got = 1;
  return 0;
}

int cudnnGetConvolutionForwardWorkspaceSize(void* h, void* a, void* b, void* c, void* d, int e, size_t* n) {
  *n = 0;
  return 0;
}

size_t cudnnGetCudartVersion(void) {
  return 13000;
}

const char* cudnnGetErrorString(int s) {
  return "null cudnn";
}

void cudnnGetLastErrorString(char* s, size_t n) {
  if (n) s[0] = 0;
}

int cudnnGetProperty(int t, int* v) {
  *v = t == 0 ? 9 : t == 1 ? 24 : 0;
  return 0;
}

int cudnnGetRNNTempSpaceSizes(void* h, void* a, int m, void* x, size_t* w, size_t* r) {
  // The backward asks for the workspace only.
  if (w) *w = 4096;
  if (r) *r = 4096;
  return 0;
}

int cudnnGetRNNWeightParams(void* h, void* d, int pl, size_t sz, void* ws, int lin, void* md, void** ma, void* bd,
                            void** ba) {
  Recurrent* r = d;
  int g = gates(r), dirs = r->dir + 1;
  // torch asks for the matrix or for the bias, and gives nothing to put the other into.
  void* nowhere;
  Tensor unasked, *m = md ? md : &unasked, *b = bd ? bd : &unasked;
  if (!ma) ma = &nowhere;
  if (!ba) ba = &nowhere;
  m->type = b->type = r->type;
  m->n = b->n = 3;
  m->dim[0] = b->dim[0] = 1;
  m->dim[1] = b->dim[1] = r->hid;
  m->dim[2] = lin < g ? (pl / dirs ? r->hid * dirs : r->in) : r->hid;
  b->dim[2] = 1;
  *ma = (char*)ws + mats(r, pl, lin) * width(r);
  *ba = r->bias ? (char*)ws + (mats(r, -1, -1) + ((size_t)pl * 2 * g + lin) * r->hid) * width(r) : 0;
  return 0;
}

int cudnnGetRNNWeightSpaceSize(void* h, void* d, size_t* n) {
  Recurrent* r = d;
  size_t e = mats(r, -1, -1);
  if (r->bias) e += (size_t)r->layers * (r->dir + 1) * 2 * gates(r) * r->hid;
  *n = e * width(r);
  return 0;
}

int cudnnGetStream(void* h, void** s) {
  *s = *(void**)h;
  return 0;
}

int cudnnGetTensorNdDescriptor(void* d, int req, int* type, int* n, int* dim, int* st) {
  Tensor* t = d;
  *type = t->type;
  *n = t->n;
  for (int i = 0; i < t->n && i < req; i++) dim[i] = t->dim[i];
  int k = 1;
  for (int i = t->n - 1; i >= 0; i--) {
    if (i < req) st[i] = k;
    k *= t->dim[i];
  }
  return 0;
}

size_t cudnnGetVersion(void) {
  return 92400;
}

int cudnnSetRNNDescriptor_v8(void* d, int algo, int mode, int bias, int dir, int im, int type, int prec, int mt, int in,
                             int hid, int proj, int layers, void* drop, unsigned aux) {
  Recurrent* r = d;
  r->mode = mode;
  r->bias = bias;
  r->dir = dir;
  r->type = type;
  r->in = in;
  r->hid = hid;
  r->proj = proj;
  r->layers = layers;
  return 0;
}

int cudnnSetStream(void* h, void* s) {
  *(void**)h = s;
  return 0;
}