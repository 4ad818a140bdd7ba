// A CUDA runtime without a GPU. Device memory is host memory, committed when it is touched; copies are memmove; a kernel
// does nothing. The host's side of libtorch_cuda (argument checks, caching allocator, launches, waits) is torch's own.
// Functions that are not here return success and do nothing: stubs.py writes them.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#define API extern "C" __attribute__((visibility("default")))

typedef std::map<uintptr_t, size_t> Blocks;  // bytes by address
static std::mutex mutex;
static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static std::atomic<long> launches{0}, waits{0}, to_host{0}, to_device{0}, on_device{0};
static size_t used_bytes = 0;

// Never destroyed: torch frees memory while the process ends.
static Blocks& device_blocks() { static auto* blocks = new Blocks; return *blocks; }
static Blocks& host_blocks() { static auto* blocks = new Blocks; return *blocks; }

static double setting(const char* name, double otherwise) { return getenv(name) ? atof(getenv(name)) : otherwise; }
static size_t total_bytes() { static size_t bytes = setting("FAKE_GPU_GIB", 139) * (1ull << 30); return bytes; }
static int capability() { static int value = setting("FAKE_SM", 90); return value; }
static int devices() { static int number = setting("FAKE_GPUS", 1); return number; }
// Copies on the device and fills of more bytes than this are left out: sizes without numbers.
static size_t most_touched() { static size_t bytes = setting("FAKE_TOUCH", 1e18); return bytes; }

static cudaError_t fail(cudaError_t error) { return last_error = error; }

// Read by emulate.py.
API long fake_counter(int which) {
  std::atomic<long>* counters[] = {&launches, &waits, &to_host, &to_device, &on_device};
  return *counters[which];
}

// --- kernels ---------------------------------------------------------------------------------------------------------

static cudaError_t launch(dim3 grid, dim3 block, size_t shared) {
  launches++;
  bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  bool large = (size_t)block.x * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535;
  if (empty || large) return fail(cudaErrorInvalidConfiguration);
  return shared > 232448 ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local Configuration configuration;

API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API char __cudaInitModule(void**) { return 1; }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(void** kernel, const void* function) { *kernel = (void*)function; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return launch(grid, block, shared);
}
API cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return launch(grid, block, shared);
}
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  return launch(grid, block, shared);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = capability();
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* number, const void*, int, size_t) {
  *number = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* number, const void*, int, size_t, unsigned) {
  *number = 2;
  return cudaSuccess;
}

// --- devices ---------------------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* number) { *number = devices(); return cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() { waits++; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = (cudaMemPool_t)0x10; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  struct cudaDeviceProp& p = *properties;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "Fake GPU (no kernels run)");
  p.totalGlobalMem = total_bytes();
  p.major = capability() / 10;
  p.minor = capability() % 10;
  p.multiProcessorCount = 132;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.regsPerBlock = p.regsPerMultiprocessor = p.totalConstMem = 65536;
  p.warpSize = 32;
  p.memPitch = p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.textureAlignment = 512;
  p.memoryBusWidth = 6144;
  p.l2CacheSize = 60 << 20;
  p.pciBusID = device + 1;
  p.asyncEngineCount = 3;
  p.concurrentKernels = p.unifiedAddressing = p.streamPrioritiesSupported = p.managedMemory = 1;
  p.cooperativeLaunch = p.memoryPoolsSupported = 1;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaGetLastError() { auto error = last_error; last_error = cudaSuccess; return error; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t) { return "error of the emulated CUDA runtime"; }
API const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }

// What torch asks of the driver.
static int driver_success() { return 0; }
static int driver_error(int, const char** text) { *text = "emulated"; return 0; }
static int driver_context(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}
API int cuCtxGetCurrent(void** context) { *context = (void*)0x10; return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, enum cudaDriverEntryPointQueryResult* result) {
  *function = (void*)driver_success;
  if (!strcmp(name, "cuGetErrorString")) *function = (void*)driver_error;
  if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *function = (void*)driver_context;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- memory ----------------------------------------------------------------------------------------------------------

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const size_t page = 1 << 21;  // what a device allocates at least
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  bytes = (bytes + page - 1) / page * page;
  std::lock_guard<std::mutex> guard(mutex);
  if (used_bytes + bytes > total_bytes()) return fail(cudaErrorMemoryAllocation);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  madvise(mapped, bytes + page, MADV_NOHUGEPAGE);
  uintptr_t aligned = ((uintptr_t)mapped + page - 1) & ~(uintptr_t)(page - 1);
  device_blocks()[aligned] = bytes;
  used_bytes += bytes;
  *pointer = (void*)aligned;
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  auto block = device_blocks().find((uintptr_t)pointer);
  if (block == device_blocks().end()) return fail(cudaErrorInvalidValue);
  munmap(pointer, block->second);
  used_bytes -= block->second;
  device_blocks().erase(block);
  return cudaSuccess;
}
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> guard(mutex);
  host_blocks()[(uintptr_t)pointer] = bytes;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  host_blocks().erase((uintptr_t)pointer);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  *pointer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return cudaHostRegister(*pointer, bytes, flags);
}
API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
API cudaError_t cudaFreeHost(void* pointer) { cudaHostUnregister(pointer); free(pointer); return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> guard(mutex);
  *total = total_bytes();
  *free_bytes = total_bytes() - used_bytes;
  return cudaSuccess;
}

static bool inside(Blocks& blocks, const void* pointer) {
  auto after = blocks.upper_bound((uintptr_t)pointer);
  if (after == blocks.begin()) return false;
  --after;
  return (uintptr_t)pointer < after->first + after->second;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  std::lock_guard<std::mutex> guard(mutex);
  if (inside(device_blocks(), pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = (void*)pointer;
  } else if (inside(host_blocks(), pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = (void*)pointer;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -1;
    attributes->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}

// Counts a copy; returns whether it stays on the device.
static bool counted(void* to, const void* from) {
  std::lock_guard<std::mutex> guard(mutex);
  bool writes = inside(device_blocks(), to), reads = inside(device_blocks(), from);
  if (writes && reads) on_device++;
  else if (writes) to_device++;
  else if (reads) to_host++;
  return writes && reads;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind) {
  bool stays = counted(to, from);
  if (bytes && !(stays && bytes > most_touched())) memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  if (bytes) memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind, cudaStream_t) {
  counted(to, from);
  for (size_t row = 0; row < height; row++) memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (bytes && bytes <= most_touched()) memset(to, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }
API cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) { *pointer = (void*)symbol; return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void* value) {
  *(uint64_t*)value = 0;
  return cudaSuccess;
}
API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return cudaErrorNotSupported; }

// --- streams and events: everything is done when it is asked for -----------------------------------------------------

static std::atomic<uintptr_t> last_handle{0x100000};
static void* new_handle() { return (void*)(last_handle += 16); }
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { *stream = (cudaStream_t)new_handle(); return cudaSuccess; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { waits++; return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { function(data); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = (cudaEvent_t)new_handle(); return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { waits++; return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 1; return cudaSuccess; }
