// NCCL between processes of one machine, whose "device memory" is host memory: messages pass through files in /dev/shm,
// and a collective is done when it is called. A rank that does not come within five minutes ends the others.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#define API extern "C" __attribute__((visibility("default")))

// What is needed of nccl.h, which wants the compiler of device code. All enumerations are integers.
typedef int Result, Type, Operation;
typedef struct Communicator* Comm;
typedef void* Stream;
struct UniqueId { char text[128]; };
static const Result SUCCESS = 0;

static const size_t SLOT = 1ull << 30;  // bytes of a rank's message; a file takes the memory that was written
static const int MOST_RANKS = 16;
struct Shared {
  std::atomic<int> arrived, generation;
  std::atomic<long> sent[MOST_RANKS][MOST_RANKS], taken[MOST_RANKS][MOST_RANKS];
};
struct Communicator {
  int rank, ranks;
  std::string name;
  Shared* shared;
  char *slots, *boxes;                // a slot for each rank; a box for each pair of ranks
  int splits = 0;
  std::map<Operation, double> factors;  // of sums that multiply first
  char* slot(int of) { return slots + of * SLOT; }
  size_t box_bytes() { return SLOT / (ranks * ranks); }
  char* box(int from, int to) { return boxes + (from * ranks + to) * box_bytes(); }
};

static void die(const char* reason) {
  fprintf(stderr, "[emulated NCCL] %s\n", reason);
  abort();
}
// FAKE_TOUCH: messages of more bytes are not moved, as copies on the device are not (runtime.cpp).
static size_t most_touched() {
  static size_t bytes = getenv("FAKE_TOUCH") ? atol(getenv("FAKE_TOUCH")) : (size_t)-1;
  return bytes;
}
static void copy(void* to, const void* from, size_t bytes) {
  if (bytes && bytes <= most_touched()) memmove(to, from, bytes);
}
static void wait_a_little() {
  struct timespec duration = {0, 50000};
  nanosleep(&duration, nullptr);
}
static char* map_file(const std::string& name, size_t size) {
  int file = open(name.c_str(), O_RDWR | O_CREAT, 0600);
  struct stat status;
  if (file < 0 || fstat(file, &status) || ((size_t)status.st_size < size && ftruncate(file, size))) die("no shared memory");
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) die("no shared memory");
  return (char*)mapped;
}
static void barrier(Comm comm) {
  Shared* shared = comm->shared;
  int generation = shared->generation;
  if (shared->arrived.fetch_add(1) + 1 == comm->ranks) {
    shared->arrived = 0;
    shared->generation++;
    return;
  }
  for (long turn = 0; shared->generation == generation; turn++) {
    wait_a_little();
    if (turn > 20 * 1000 * 300) die("a rank did not come to a collective in 5 minutes");
  }
}

// --- numbers ---------------------------------------------------------------------------------------------------------

static const size_t WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // bytes of ncclInt8 ... ncclFloat8e5m2
template <typename T> static T& at(char* values, size_t index) { return ((T*)values)[index]; }
static float of_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static double get(char* values, size_t index, Type type) {
  switch (type) {
    case 0: return at<int8_t>(values, index);
    case 1: return at<uint8_t>(values, index);
    case 2: return at<int32_t>(values, index);
    case 3: return at<uint32_t>(values, index);
    case 4: return at<int64_t>(values, index);
    case 5: return at<uint64_t>(values, index);
    case 6: return at<_Float16>(values, index);
    case 7: return at<float>(values, index);
    case 8: return at<double>(values, index);
    case 9: return of_bfloat16(at<uint16_t>(values, index));
  }
  die("numbers of this type are not added");
  return 0;
}
static void put(char* values, size_t index, Type type, double value) {
  switch (type) {
    case 0: at<int8_t>(values, index) = value; break;
    case 1: at<uint8_t>(values, index) = value; break;
    case 2: at<int32_t>(values, index) = value; break;
    case 3: at<uint32_t>(values, index) = value; break;
    case 4: at<int64_t>(values, index) = value; break;
    case 5: at<uint64_t>(values, index) = value; break;
    case 6: at<_Float16>(values, index) = value; break;
    case 7: at<float>(values, index) = value; break;
    case 8: at<double>(values, index) = value; break;
    case 9: at<uint16_t>(values, index) = to_bfloat16(value); break;
  }
}
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, MEAN };
static double combined(double left, double right, Operation operation) {
  switch (operation) {
    case PRODUCT: return left * right;
    case MAXIMUM: return right > left ? right : left;
    case MINIMUM: return right < left ? right : left;
    default: return left + right;
  }
}
// Reduces `count` numbers of all slots, from the number `offset` on.
static void reduce(Comm comm, void* out, size_t offset, size_t count, Type type, Operation operation) {
  if (count * WIDTHS[type] > most_touched()) return;
  double factor = comm->factors.count(operation) ? comm->factors[operation] : 1;
  for (size_t index = 0; index < count; index++) {
    double value = factor * get(comm->slot(0), offset + index, type);
    for (int rank = 1; rank < comm->ranks; rank++)
      value = combined(value, factor * get(comm->slot(rank), offset + index, type), operation);
    put((char*)out, index, type, operation == MEAN ? value / comm->ranks : value);
  }
}

// --- communicators ---------------------------------------------------------------------------------------------------

API Result ncclGetVersion(int* version) { *version = 22907; return SUCCESS; }
API const char* ncclGetErrorString(Result) { return "error of the emulated NCCL"; }
API const char* ncclGetLastError(Comm) { return ""; }
API Result ncclGetUniqueId(UniqueId* id) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "/dev/shm/emulated-nccl-%d-%ld-%ld", getpid(), (long)now.tv_sec, (long)now.tv_nsec);
  return SUCCESS;
}
static Result join(Comm* out, int ranks, const std::string& name, int rank) {
  auto comm = new Communicator{rank, ranks, name};
  comm->shared = (Shared*)map_file(name + ".h", sizeof(Shared));
  comm->slots = map_file(name + ".s", SLOT * ranks);
  comm->boxes = map_file(name + ".p", SLOT);
  barrier(comm);
  *out = comm;
  return SUCCESS;
}
API Result ncclCommInitRank(Comm* comm, int ranks, UniqueId id, int rank) { return join(comm, ranks, id.text, rank); }
API Result ncclCommInitRankConfig(Comm* comm, int ranks, UniqueId id, int rank, void*) { return join(comm, ranks, id.text, rank); }
API Result ncclCommInitRankScalable(Comm* comm, int ranks, int rank, int, UniqueId* ids, void*) {
  return join(comm, ranks, ids[0].text, rank);
}
API Result ncclCommSplit(Comm comm, int color, int key, Comm* out, void*) {
  int split = comm->splits++, ranks = 0, rank = 0, mine[2] = {color, key};
  memcpy(comm->slot(comm->rank), mine, sizeof mine);
  barrier(comm);
  for (int other = 0; other < comm->ranks; other++) {
    int theirs[2];
    memcpy(theirs, comm->slot(other), sizeof theirs);
    if (theirs[0] != color) continue;
    ranks++;
    if (theirs[1] < key || (theirs[1] == key && other < comm->rank)) rank++;
  }
  barrier(comm);
  *out = nullptr;
  if (color < 0) return SUCCESS;
  return join(out, ranks, comm->name + "-" + std::to_string(split) + "." + std::to_string(color), rank);
}
API Result ncclCommDestroy(Comm comm) {
  if (comm && comm->rank == 0)
    for (auto ending : {".h", ".s", ".p"}) unlink((comm->name + ending).c_str());
  return SUCCESS;
}
API Result ncclCommAbort(Comm comm) { return ncclCommDestroy(comm); }
API Result ncclCommGetAsyncError(Comm, Result* error) { *error = SUCCESS; return SUCCESS; }
API Result ncclCommCount(Comm comm, int* ranks) { *ranks = comm->ranks; return SUCCESS; }
API Result ncclCommUserRank(Comm comm, int* rank) { *rank = comm->rank; return SUCCESS; }
API Result ncclCommRegister(Comm, void*, size_t, void** handle) { *handle = (void*)1; return SUCCESS; }
API Result ncclRedOpCreatePreMulSum(Operation* operation, void* factor, Type type, int, Comm comm) {
  *operation = 100 + comm->factors.size();
  comm->factors[*operation] = get((char*)factor, 0, type);
  return SUCCESS;
}

// --- collectives -----------------------------------------------------------------------------------------------------

static void put_into_slots(Comm comm, const void* from, size_t bytes) {
  if (bytes > SLOT) die("a message is larger than 1 GiB");
  copy(comm->slot(comm->rank), from, bytes);
  barrier(comm);
}
static Result done(Comm comm) { barrier(comm); return SUCCESS; }

API Result ncclAllGather(const void* from, void* to, size_t count, Type type, Comm comm, Stream) {
  size_t bytes = count * WIDTHS[type];
  put_into_slots(comm, from, bytes);
  for (int rank = 0; rank < comm->ranks; rank++) copy((char*)to + rank * bytes, comm->slot(rank), bytes);
  return done(comm);
}
API Result ncclReduceScatter(const void* from, void* to, size_t count, Type type, Operation operation, Comm comm, Stream) {
  put_into_slots(comm, from, count * comm->ranks * WIDTHS[type]);
  reduce(comm, to, count * comm->rank, count, type, operation);
  return done(comm);
}
API Result ncclAllReduce(const void* from, void* to, size_t count, Type type, Operation operation, Comm comm, Stream) {
  put_into_slots(comm, from, count * WIDTHS[type]);
  reduce(comm, to, 0, count, type, operation);
  return done(comm);
}
API Result ncclReduce(const void* from, void* to, size_t count, Type type, Operation operation, int root, Comm comm, Stream) {
  put_into_slots(comm, from, count * WIDTHS[type]);
  if (comm->rank == root) reduce(comm, to, 0, count, type, operation);
  return done(comm);
}
API Result ncclBroadcast(const void* from, void* to, size_t count, Type type, int root, Comm comm, Stream) {
  size_t bytes = count * WIDTHS[type];
  put_into_slots(comm, from, comm->rank == root ? bytes : 0);
  copy(to, comm->slot(root), bytes);
  return done(comm);
}
API Result ncclBcast(void* values, size_t count, Type type, int root, Comm comm, Stream stream) {
  return ncclBroadcast(values, values, count, type, root, comm, stream);
}
API Result ncclAlltoAll(const void* from, void* to, size_t count, Type type, Comm comm, Stream) {
  size_t bytes = count * WIDTHS[type];
  put_into_slots(comm, from, bytes * comm->ranks);
  for (int rank = 0; rank < comm->ranks; rank++)
    copy((char*)to + rank * bytes, comm->slot(rank) + comm->rank * bytes, bytes);
  return done(comm);
}
API Result ncclSend(const void* from, size_t count, Type type, int peer, Comm comm, Stream) {
  size_t bytes = count * WIDTHS[type];
  if (bytes > comm->box_bytes()) die("a message to one rank is too large");
  auto &sent = comm->shared->sent[comm->rank][peer], &taken = comm->shared->taken[comm->rank][peer];
  while (taken < sent) wait_a_little();
  copy(comm->box(comm->rank, peer), from, bytes);
  sent++;
  return SUCCESS;
}
API Result ncclRecv(void* to, size_t count, Type type, int peer, Comm comm, Stream) {
  auto &sent = comm->shared->sent[peer][comm->rank], &taken = comm->shared->taken[peer][comm->rank];
  while (sent <= taken) wait_a_little();
  copy(to, comm->box(peer, comm->rank), count * WIDTHS[type]);
  taken++;
  return SUCCESS;
}
