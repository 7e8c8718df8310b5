-- What a device did in a measurement of nothing else: the constants that predicted times rest on.
-- Grain: one row per device, constant, dtype, size, number of threads and source; the latest measurement counts.
CREATE TABLE device_constant (
    device_digest VARCHAR NOT NULL,
    constant VARCHAR NOT NULL,
    dtype VARCHAR NOT NULL,
    size VARCHAR NOT NULL,
    amount DOUBLE NOT NULL,
    value DOUBLE NOT NULL,
    unit VARCHAR NOT NULL,
    spread DOUBLE,
    threads BIGINT NOT NULL,
    other_cpu_share DOUBLE,
    status VARCHAR NOT NULL DEFAULT 'ok',
    source VARCHAR NOT NULL DEFAULT 'measured',
    measured_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (device_digest, constant, dtype, size, threads, source)
);
COMMENT ON TABLE device_constant IS 'What a device did in a measurement of nothing else: the constants that predicted times rest on. Grain: one row per device, constant, dtype, size, number of threads and source; the latest measurement counts.';
COMMENT ON COLUMN device_constant.device_digest IS 'as in device';
COMMENT ON COLUMN device_constant.constant IS 'read_bandwidth, copy_bandwidth (bytes read and bytes written both count), matmul_rate, launch_overhead (of starting the smallest operation)';
COMMENT ON COLUMN device_constant.dtype IS 'of the numbers that were read, copied or multiplied';
COMMENT ON COLUMN device_constant.size IS 'what one call worked on: 64 MiB, or rows x columns x depth of a product';
COMMENT ON COLUMN device_constant.amount IS 'the same as a number: bytes or FLOPs of one call, 1 for a launch';
COMMENT ON COLUMN device_constant.value IS 'the constant, in unit: at the median of the repeats';
COMMENT ON COLUMN device_constant.unit IS 'B/s, FLOP/s (a multiplication and an addition are two) or s';
COMMENT ON COLUMN device_constant.spread IS 'standard error of value, in unit; NULL of one repeat';
COMMENT ON COLUMN device_constant.threads IS 'CPU threads of torch';
COMMENT ON COLUMN device_constant.other_cpu_share IS 'share of the CPU that others took meanwhile, 0 to 1';
COMMENT ON COLUMN device_constant.status IS 'ok, or noisy: others used the CPU meanwhile';
COMMENT ON COLUMN device_constant.source IS 'measured, or datasheet: said by the maker';
COMMENT ON COLUMN device_constant.measured_at IS 'when, UTC';
