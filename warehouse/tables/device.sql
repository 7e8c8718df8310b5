-- A machine and the part of it that computes.
-- Grain: one row per device.
CREATE TABLE device (
    device_digest VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    cores BIGINT NOT NULL,
    memory_bytes BIGINT NOT NULL,
    torch_version VARCHAR NOT NULL,
    driver VARCHAR,
    PRIMARY KEY (device_digest)
);
COMMENT ON TABLE device IS 'A machine and the part of it that computes. Grain: one row per device.';
COMMENT ON COLUMN device.device_digest IS 'sha256 of the columns that follow';
COMMENT ON COLUMN device.kind IS 'cpu or cuda';
COMMENT ON COLUMN device.name IS 'the model name that it gives itself';
COMMENT ON COLUMN device.cores IS 'CPU cores that the process may use';
COMMENT ON COLUMN device.memory_bytes IS 'bytes of memory of the device';
COMMENT ON COLUMN device.torch_version IS 'version of torch';
COMMENT ON COLUMN device.driver IS 'version of the GPU driver; NULL on a CPU';
