-- REGISTER: make a worker incarnation known: its fence, the groups, its consumers. Its id is fresh, so a repeat is harmless.
-- The consumers are created here and not by the first read, so that a worker that dies before it is still visible to REAP.
-- KEYS  w, q...
-- ARGV  group, worker id
-- reply OK
redis.call('SET', KEYS[1], 0, 'NX')
for i = 2, #KEYS do
  redis.pcall('XGROUP', 'CREATE', KEYS[i], ARGV[1], '0', 'MKSTREAM') -- an error means that the group is there
  redis.call('XGROUP', 'CREATECONSUMER', KEYS[i], ARGV[1], ARGV[2])
end
return 'OK'
