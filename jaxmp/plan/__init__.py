"""`jaxmp plan`: codecs, schedule and micro-batches for the least predicted step over a link."""
