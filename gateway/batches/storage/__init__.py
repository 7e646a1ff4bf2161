"""Files and batches on disk: records, catalog, quota. Blocking. Used by the routes of both, and by the driver."""
