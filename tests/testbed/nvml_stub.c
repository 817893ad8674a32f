/*
 * A stand-in for libnvidia-ml.so.1 on machines without a GPU.
 *
 * It exports the entry points of NVIDIA's C library that a monitoring client calls, with NVIDIA's structure
 * layouts, and answers from a text file, so that an unmodified nvidia-ml-py (`import pynvml`) reads GPUs that
 * are not there. The file is read again on every call: change it and the next reading changes.
 *
 * The file is $GPUSCHED_NVML_FILE, by default /run/gpusched-testbed/nvml/nvml.conf. Lines are `key=value`; `#`
 * starts a comment line; of two lines with one key the last one counts.
 *
 *   driver, nvml, cuda, count     the system's figures
 *   init_error=N                  nvmlInit fails with N (9: driver not loaded); so does a missing file
 *   gpuI.KEY / gpu*.KEY           a figure of GPU I, or of every GPU without its own:
 *     name uuid serial pci        text; pci as 00000000:07:00.0
 *     mem_total mem_used mem_reserved                    bytes
 *     util_gpu util_mem                                  percent
 *     power_mw power_limit_mw energy_mj temp_c           units in the names
 *     mig ecc_mode persistence compute_mode              0 or 1 (compute_mode 0..3)
 *     ecc.TYPE.COUNTER            errors; TYPE 0 corrected, 1 uncorrected; COUNTER 0 volatile, 1 aggregate
 *     remapped=CORR,UNC,PENDING,FAILED                   remapped memory rows
 *     clocks_event_reasons        bit mask
 *     cc_major cc_minor minor     compute capability; /dev/nvidiaMINOR
 *     procs, graphics_procs       pid:bytes,pid:bytes
 *     proc_util                   pid:percent,pid:percent
 *     nvlinks=N, nvlinkL=0        number of links; a link that is down
 *     nvlinkL.peer, nvlinkL.peer_type                    PCI address at the far end; 0 GPU, 2 switch
 *     fabric=UUID,CLIQUE,STATE    NVLink domain: 32 hexadecimal digits; state 3 has joined
 *     error=N                     every call on this GPU fails with N (15: GPU is lost)
 *     delay_ms=N                  every call on this GPU takes this long
 *   topo, topo.I.J (I < J)        nearest common ancestor of two GPUs: 0 10 20 30 40 50
 *
 * A key that is not in the file, or a number that is empty, answers NVML_ERROR_NOT_SUPPORTED, as an old board does.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT_FILE "/run/gpusched-testbed/nvml/nvml.conf"
#define MAX_GPUS 64
#define TEXT 1024

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

typedef struct { int index; } Gpu;
static Gpu gpus[MAX_GPUS];
static int init_count;

/* ---- the file ------------------------------------------------------------------------------------------- */

static FILE *open_file(void) {
    const char *path = getenv("GPUSCHED_NVML_FILE");
    return fopen(path ? path : DEFAULT_FILE, "re");
}

static int lookup(const char *key, char *out, size_t size) {
    FILE *file = open_file();
    if (!file) return 0;
    char *line = NULL;
    size_t capacity = 0, length = strlen(key);
    int found = 0;
    while (getline(&line, &capacity, file) > 0) {
        line[strcspn(line, "\r\n")] = 0;
        if (!strncmp(line, key, length) && line[length] == '=') {
            snprintf(out, size, "%s", line + length + 1);
            found = 1;
        }
    }
    free(line);
    fclose(file);
    return found;
}

static int copy_text(const char *text, char *out, u32 size) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int system_text(const char *key, char *out, u32 size) {
    char text[TEXT];
    if (!init_count) return UNINITIALIZED;
    return lookup(key, text, sizeof text) ? copy_text(text, out, size) : NOT_SUPPORTED;
}

static long gpu_number_or(const Gpu *gpu, const char *key, long otherwise) {
    char full[96], text[TEXT];
    snprintf(full, sizeof full, "gpu%d.%s", gpu->index, key);
    if (lookup(full, text, sizeof text)) return strtol(text, NULL, 0);
    snprintf(full, sizeof full, "gpu*.%s", key);
    return lookup(full, text, sizeof text) ? strtol(text, NULL, 0) : otherwise;
}

/* Is this a handle we gave out, and is the GPU well? Every call on a GPU begins here. */
static int check(const Gpu *gpu) {
    if (!init_count) return UNINITIALIZED;
    if (gpu < gpus || gpu >= gpus + MAX_GPUS) return INVALID_ARGUMENT;
    long delay_ms = gpu_number_or(gpu, "delay_ms", 0);
    if (delay_ms > 0) usleep((useconds_t)delay_ms * 1000);
    return (int)gpu_number_or(gpu, "error", SUCCESS);
}

static int gpu_raw(const Gpu *gpu, const char *key, char *out, size_t size) {
    char full[96];
    int result = check(gpu);
    if (result) return result;
    snprintf(full, sizeof full, "gpu%d.%s", gpu->index, key);
    if (lookup(full, out, size)) return SUCCESS;
    snprintf(full, sizeof full, "gpu*.%s", key);
    return lookup(full, out, size) ? SUCCESS : NOT_SUPPORTED;
}

static int gpu_text(const Gpu *gpu, const char *key, char *out, u32 size) {
    char text[TEXT];
    int result = gpu_raw(gpu, key, text, sizeof text);
    return result ? result : copy_text(text, out, size);
}

static int gpu_u64(const Gpu *gpu, const char *key, u64 *out) {
    char text[TEXT];
    int result = gpu_raw(gpu, key, text, sizeof text);
    if (!result && !*text) return NOT_SUPPORTED;
    if (!result) *out = strtoull(text, NULL, 0);
    return result;
}

static int gpu_u32(const Gpu *gpu, const char *key, u32 *out) {
    u64 value;
    int result = gpu_u64(gpu, key, &value);
    if (!result) *out = (u32)value;
    return result;
}

/* ---- the library and the system -------------------------------------------------------------------------- */

int nvmlInitWithFlags(u32 flags) {
    char text[TEXT];
    (void)flags;
    FILE *file = open_file();
    if (!file) return DRIVER_NOT_LOADED;
    fclose(file);
    if (lookup("init_error", text, sizeof text) && atoi(text)) return atoi(text);
    for (int i = 0; i < MAX_GPUS; i++) gpus[i].index = i;
    init_count++;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!init_count) return UNINITIALIZED;
    init_count--;
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, u32 size) { return system_text("driver", out, size); }
int nvmlSystemGetNVMLVersion(char *out, u32 size) { return system_text("nvml", out, size); }

int nvmlSystemGetCudaDriverVersion(int *out) {
    char text[TEXT];
    int result = system_text("cuda", text, sizeof text);
    if (!result) *out = atoi(text);
    return result;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

/* ---- handles ---------------------------------------------------------------------------------------------- */

int nvmlDeviceGetCount_v2(u32 *out) {
    char text[TEXT];
    int result = system_text("count", text, sizeof text);
    if (!result) *out = (u32)atoi(text);
    return result;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, Gpu **out) {
    u32 count;
    int result = nvmlDeviceGetCount_v2(&count);
    if (result) return result;
    if (index >= count || index >= MAX_GPUS) return INVALID_ARGUMENT;
    *out = &gpus[index];
    return check(*out);
}

/* The GPU whose text figure `key` equals `wanted`; a lost GPU cannot be found. */
static int find_gpu(const char *key, const char *wanted, Gpu **out) {
    char text[TEXT];
    u32 count;
    int result = nvmlDeviceGetCount_v2(&count);
    if (result) return result;
    for (u32 i = 0; i < count && i < MAX_GPUS; i++)
        if (!gpu_raw(&gpus[i], key, text, sizeof text) && !strcasecmp(text, wanted)) {
            *out = &gpus[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **out) { return find_gpu("uuid", uuid, out); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Gpu **out) { return find_gpu("pci", pci, out); }

int nvmlDeviceGetIndex(Gpu *gpu, u32 *out) {
    int result = check(gpu);
    if (!result) *out = (u32)gpu->index;
    return result;
}

int nvmlDeviceGetMinorNumber(Gpu *gpu, u32 *out) {
    int result = check(gpu);
    if (!result) *out = (u32)gpu_number_or(gpu, "minor", gpu->index);
    return result;
}

/* ---- figures ---------------------------------------------------------------------------------------------- */

int nvmlDeviceGetName(Gpu *gpu, char *out, u32 size) { return gpu_text(gpu, "name", out, size); }
int nvmlDeviceGetUUID(Gpu *gpu, char *out, u32 size) { return gpu_text(gpu, "uuid", out, size); }
int nvmlDeviceGetSerial(Gpu *gpu, char *out, u32 size) { return gpu_text(gpu, "serial", out, size); }
int nvmlDeviceGetPowerUsage(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "power_mw", out); }
int nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "power_limit_mw", out); }
int nvmlDeviceGetPowerManagementLimit(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "power_limit_mw", out); }
int nvmlDeviceGetTotalEnergyConsumption(Gpu *gpu, u64 *out) { return gpu_u64(gpu, "energy_mj", out); }
int nvmlDeviceGetPersistenceMode(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "persistence", out); }
int nvmlDeviceGetComputeMode(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "compute_mode", out); }
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, u64 *out) { return gpu_u64(gpu, "clocks_event_reasons", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, u64 *out) { return gpu_u64(gpu, "clocks_event_reasons", out); }

typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;

int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory2 *out) {
    if (out->version != (sizeof *out | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    int result = gpu_u64(gpu, "mem_total", &out->total);
    if (!result) result = gpu_u64(gpu, "mem_used", &out->used);
    if (result) return result;
    if (gpu_u64(gpu, "mem_reserved", &out->reserved)) out->reserved = 0;
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}

/* The first version of the call counts what the driver reserves as used. */
int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *out) {
    Memory2 memory = {.version = sizeof memory | 2u << 24};
    int result = nvmlDeviceGetMemoryInfo_v2(gpu, &memory);
    if (!result) *out = (Memory){memory.total, memory.free, memory.used + memory.reserved};
    return result;
}

typedef struct { u32 gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *out) {
    int result = gpu_u32(gpu, "util_gpu", &out->gpu);
    return result ? result : gpu_u32(gpu, "util_mem", &out->memory);
}

typedef struct { u32 version, sensor; int celsius; } Temperature;

int nvmlDeviceGetTemperature(Gpu *gpu, u32 sensor, u32 *out) {
    return sensor ? INVALID_ARGUMENT : gpu_u32(gpu, "temp_c", out);
}

int nvmlDeviceGetTemperatureV(Gpu *gpu, Temperature *out) {
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return nvmlDeviceGetTemperature(gpu, out->sensor, (u32 *)&out->celsius);
}

static int mode(Gpu *gpu, const char *key, u32 *current, u32 *pending) {
    int result = gpu_u32(gpu, key, current);
    if (!result) *pending = *current;
    return result;
}

int nvmlDeviceGetMigMode(Gpu *gpu, u32 *current, u32 *pending) { return mode(gpu, "mig", current, pending); }
int nvmlDeviceGetEccMode(Gpu *gpu, u32 *current, u32 *pending) { return mode(gpu, "ecc_mode", current, pending); }

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, u32 type, u32 counter, u64 *out) {
    char key[48];
    snprintf(key, sizeof key, "ecc.%u.%u", type, counter);
    return gpu_u64(gpu, key, out);
}

/* Only device memory (location 2) keeps a count here: the same one as the total. */
int nvmlDeviceGetMemoryErrorCounter(Gpu *gpu, u32 type, u32 counter, u32 location, u64 *out) {
    return location == 2 ? nvmlDeviceGetTotalEccErrors(gpu, type, counter, out) : NOT_SUPPORTED;
}

int nvmlDeviceGetRemappedRows(Gpu *gpu, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    char text[TEXT];
    int result = gpu_raw(gpu, "remapped", text, sizeof text);
    if (result) return result;
    return sscanf(text, "%u,%u,%u,%u", corrected, uncorrected, pending, failed) == 4 ? SUCCESS : UNKNOWN;
}

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    int result = gpu_u32(gpu, "cc_major", (u32 *)major);
    return result ? result : gpu_u32(gpu, "cc_minor", (u32 *)minor);
}

/* ---- processes -------------------------------------------------------------------------------------------- */

typedef struct { u32 pid; u64 used_bytes; u32 gpu_instance, compute_instance; } Process;

/* As NVIDIA's: `count` is the room in `out` on entry and the number of processes on return. */
static int processes(Gpu *gpu, const char *key, u32 *count, Process *out) {
    char text[TEXT] = "";
    int result = gpu_raw(gpu, key, text, sizeof text);
    if (result && result != NOT_SUPPORTED) return result;
    u32 room = *count, found = 0;
    char *rest = text;
    for (char *item; (item = strsep(&rest, ","));) {
        if (!*item) continue;
        char *colon = strchr(item, ':');
        Process process = {(u32)strtoul(item, NULL, 10), colon ? strtoull(colon + 1, NULL, 0) : ~0ULL, ~0u, ~0u};
        if (out && found < room) out[found] = process;
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "procs", count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "procs", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "graphics_procs", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "graphics_procs", count, out);
}

typedef struct { u32 pid; u64 time_us; u32 sm, memory, encoder, decoder; } ProcessShare;

/* As NVIDIA's: processes that did nothing are left out, and where none did anything nothing is found. */
int nvmlDeviceGetProcessUtilization(Gpu *gpu, ProcessShare *out, u32 *count, u64 since_us) {
    char text[TEXT] = "";
    int result = gpu_raw(gpu, "proc_util", text, sizeof text);
    if (result) return result;
    u32 room = out ? *count : 0, found = 0;
    char *rest = text;
    for (char *item; (item = strsep(&rest, ","));) {
        char *colon = strchr(item, ':');
        if (!colon) continue;
        if (found < room) out[found] = (ProcessShare){.pid = (u32)strtoul(item, NULL, 10), .time_us = since_us + 1,
                                                      .sm = (u32)strtoul(colon + 1, NULL, 10)};
        found++;
    }
    *count = found;
    return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* ---- PCI, NVLink, topology -------------------------------------------------------------------------------- */

typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;

static int parse_pci(const char *text, Pci *out) {
    u32 function;
    memset(out, 0, sizeof *out);
    if (sscanf(text, "%x:%x:%x.%u", &out->domain, &out->bus, &out->device, &function) != 4) return UNKNOWN;
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.%u", out->domain, out->bus, out->device, function);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.%u", out->domain, out->bus, out->device, function);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *out) {
    char text[TEXT];
    int result = gpu_raw(gpu, "pci", text, sizeof text);
    return result ? result : parse_pci(text, out);
}

static int link_key(Gpu *gpu, u32 link, const char *suffix, char *key, size_t size) {
    u32 links;
    int result = gpu_u32(gpu, "nvlinks", &links);
    if (result) return result;
    snprintf(key, size, "nvlink%u%s", link, suffix);
    return link < links ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(Gpu *gpu, u32 link, u32 *active) {
    char key[48];
    int result = link_key(gpu, link, "", key, sizeof key);
    if (!result) *active = gpu_number_or(gpu, key, 1) != 0;
    return result;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, u32 link, Pci *out) {
    char key[48], text[TEXT];
    int result = link_key(gpu, link, ".peer", key, sizeof key);
    if (!result) result = gpu_raw(gpu, key, text, sizeof text);
    return result ? result : parse_pci(text, out);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Gpu *gpu, u32 link, u32 *out) {
    char key[48];
    int result = link_key(gpu, link, ".peer_type", key, sizeof key);
    return result ? result : gpu_u32(gpu, key, out);
}

typedef struct { u32 version; unsigned char uuid[16]; u32 status, clique, state, health; } Fabric;

int nvmlDeviceGetGpuFabricInfoV(Gpu *gpu, Fabric *out) {
    char text[TEXT], digits[33];
    int result = gpu_raw(gpu, "fabric", text, sizeof text);
    if (result) return result;
    if (out->version != 0x02000024) return ARGUMENT_VERSION_MISMATCH;
    if (sscanf(text, "%32[0-9a-f],%u,%u", digits, &out->clique, &out->state) != 3) return UNKNOWN;
    for (int i = 0; i < 16; i++) {
        u32 byte;
        sscanf(digits + 2 * i, "%2x", &byte);
        out->uuid[i] = (unsigned char)byte;
    }
    out->status = SUCCESS;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Gpu *a, Gpu *b, u32 *out) {
    char key[48], text[TEXT];
    int result = check(a);
    if (!result) result = check(b);
    if (result) return result;
    snprintf(key, sizeof key, "topo.%d.%d", a->index < b->index ? a->index : b->index,
             a->index < b->index ? b->index : a->index);
    if (a == b) *out = 0;
    else if (lookup(key, text, sizeof text) || lookup("topo", text, sizeof text)) *out = (u32)atoi(text);
    else return NOT_SUPPORTED;
    return SUCCESS;
}
