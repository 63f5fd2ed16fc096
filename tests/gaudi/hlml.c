/*
 * A library with the functions of Intel's libhlml that habana-pyhlml calls for counters.
 *
 * The devices are an array. A test sets their counters and the result of a function with the
 * functions at the end. Codes of errors are those of HLML_RETURN.
 */
#include <stddef.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2 };
enum { MAX_DEVICES = 8, ON_AIP = 0, UNCORRECTED = 1, AGGREGATE = 1 };

typedef struct {
    unsigned busy_percent;
    unsigned milliwatts;
    unsigned celsius;
    unsigned long long used_bytes;
    unsigned long long total_bytes;
    long long ecc_errors;
} device_t;

typedef struct {
    unsigned aip;
    unsigned memory;
} utilization_t;

typedef struct {
    unsigned long long free;
    unsigned long long total;
    unsigned long long used;
} memory_t;

static device_t devices[MAX_DEVICES];
static unsigned num_devices;
static int is_initialized;
static const char *failing_function;
static int failure;
static char name_of_failing_function[64];

static int check(const char *function, const void *device, const void *result) {
    if (failing_function != NULL && strcmp(function, failing_function) == 0) return failure;
    if (!is_initialized) return UNINITIALIZED;
    return device == NULL || result == NULL ? INVALID_ARGUMENT : SUCCESS;
}

int hlml_init(void) {
    if (failing_function != NULL && strcmp(__func__, failing_function) == 0) return failure;
    is_initialized = 1;
    return SUCCESS;
}

int hlml_shutdown(void) {
    int code = check(__func__, devices, devices);
    is_initialized = 0;
    return code;
}

int hlml_device_get_count(unsigned *count) {
    int code = check(__func__, devices, count);
    if (code == SUCCESS) *count = num_devices;
    return code;
}

int hlml_device_get_handle_by_index(unsigned index, void **handle) {
    int code = check(__func__, devices, handle);
    if (code != SUCCESS) return code;
    if (index >= num_devices) return INVALID_ARGUMENT;
    *handle = &devices[index];
    return SUCCESS;
}

int hlml_device_get_utilization_rates(const device_t *device, utilization_t *rates) {
    int code = check(__func__, device, rates);
    if (code == SUCCESS) rates->aip = device->busy_percent;
    return code;
}

int hlml_device_get_memory_info(const device_t *device, memory_t *memory) {
    int code = check(__func__, device, memory);
    if (code != SUCCESS) return code;
    memory->used = device->used_bytes;
    memory->total = device->total_bytes;
    memory->free = device->total_bytes - device->used_bytes;
    return SUCCESS;
}

int hlml_device_get_power_usage(const device_t *device, unsigned *milliwatts) {
    int code = check(__func__, device, milliwatts);
    if (code == SUCCESS) *milliwatts = device->milliwatts;
    return code;
}

int hlml_device_get_temperature(const device_t *device, int sensor, unsigned *celsius) {
    int code = check(__func__, device, celsius);
    if (code != SUCCESS) return code;
    if (sensor != ON_AIP) return INVALID_ARGUMENT;
    *celsius = device->celsius;
    return SUCCESS;
}

int hlml_device_get_total_ecc_errors(
    const device_t *device, int error_type, int counter_type, long long *count) {
    int code = check(__func__, device, count);
    if (code != SUCCESS) return code;
    if (error_type != UNCORRECTED || counter_type != AGGREGATE) return INVALID_ARGUMENT;
    *count = device->ecc_errors;
    return SUCCESS;
}

/* What a test calls. */

void reset(unsigned count) {
    memset(devices, 0, sizeof devices);
    num_devices = count;
    is_initialized = 0;
    failing_function = NULL;
}

void fail(const char *function, int code) {
    strncpy(name_of_failing_function, function, sizeof name_of_failing_function - 1);
    failing_function = name_of_failing_function;
    failure = code;
}

device_t *get_device(unsigned index) { return &devices[index]; }
