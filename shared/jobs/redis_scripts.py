"""The atomic steps of the Redis queue, as Lua. Each takes the key prefix as KEYS[1]; numbers travel as text.

Keys under the prefix (a hash tag keeps them in one cluster slot):

    job:<id>      hash    record (JSON), revision, state, number, entry (its message in `ready`, '' if none), digest
    events:<id>   stream  the history; message id <sequence>-0
    bound:<id>    set     request ids this job answers
    ready         stream  group `workers`: jobs that may be claimed, and, pending in the group, those that are
    delayed       zset    queued jobs that may be claimed only later, by available_s
    queued        set     ids of all queued jobs
    due           zset    all jobs by due_s
    numbers       zset    all jobs in order of acceptance
    requests      hash    request id -> "<digest of what was asked> <job id>"
    digests       hash    what makes it one build -> newest job that a new request may join
    counts        hash    state -> jobs in it

A message stays pending in the group while its job runs: heartbeats reset its idle time. `ready` is bounded by the jobs that wait or
run, because a message is deleted as soon as its job does neither.
"""

from __future__ import annotations

_ALLOW_OOM = "#!lua flags=allow-oom\n"
"""Out of memory, Redis takes no new job, but those it has go on and end."""

_COMMON = """
local p = KEYS[1]
local call = redis.call

local function withdraw(id)
    local entry = call('HGET', p .. 'job:' .. id, 'entry')
    if entry and entry ~= '' then
        redis.pcall('XACK', p .. 'ready', 'workers', entry)
        call('XDEL', p .. 'ready', entry)
        call('HSET', p .. 'job:' .. id, 'entry', '')
    end
    call('ZREM', p .. 'delayed', id)
end

local function announce(id)
    call('HSET', p .. 'job:' .. id, 'entry', call('XADD', p .. 'ready', '*', 'job', id))
end

local function leave_digest(id, digest)
    if call('HGET', p .. 'digests', digest) == id then call('HDEL', p .. 'digests', digest) end
end
"""

_STORE = """
-- ARGV: id, revision, state, record, digest, joinable, worker, available_s, due_s, now
local id, revision, state, record, digest, joinable, worker = unpack(ARGV, 1, 7)
local available_s, due_s, now = ARGV[8], ARGV[9], ARGV[10]
local key = p .. 'job:' .. id

-- From `first` on ARGV holds the new events: sequence and record of each.
local function store(first)
    local old = call('HGET', key, 'state')
    if old then call('HINCRBY', p .. 'counts', old, -1) end
    call('HINCRBY', p .. 'counts', state, 1)
    call('HSET', key, 'record', record, 'revision', revision, 'state', state, 'digest', digest)
    call('ZADD', p .. 'due', due_s, id)
    if joinable == '1' then call('HSET', p .. 'digests', digest, id) else leave_digest(id, digest) end
    if state == 'running' or state == 'publishing' then
        call('SREM', p .. 'queued', id)
        redis.pcall('XCLAIM', p .. 'ready', 'workers', worker, 0, call('HGET', key, 'entry'), 'JUSTID')
    else
        withdraw(id)
        call('SREM', p .. 'queued', id)
        if state == 'queued' then
            call('SADD', p .. 'queued', id)
            if tonumber(available_s) <= tonumber(now) then announce(id) else call('ZADD', p .. 'delayed', available_s, id) end
        end
    end
    for i = first, #ARGV, 2 do call('XADD', p .. 'events:' .. id, ARGV[i] .. '-0', 'event', ARGV[i + 1]) end
end
"""

COMMIT = (
    _ALLOW_OOM
    + _COMMON
    + _STORE
    + """
if call('HGET', key, 'revision') ~= string.format('%d', tonumber(revision) - 1) then return 0 end
store(11)
return 1
"""
)

INSERT = (
    "#!lua\n"
    + _COMMON
    + _STORE
    + """
-- ARGV goes on: request, asked, reuse, max_queued
local request, asked, reuse, max_queued = unpack(ARGV, 11, 14)

local function answer(other)
    local known = call('HGET', p .. 'requests', request)
    if known then call('SREM', p .. 'bound:' .. string.match(known, ' (.*)'), request) end
    call('HSET', p .. 'requests', request, asked .. ' ' .. other)
    call('SADD', p .. 'bound:' .. other, request)
end

local function may_answer(other)
    local found = call('HGET', p .. 'job:' .. other, 'state')
    return found and (reuse == '1' or found ~= 'succeeded')
end

local known = call('HGET', p .. 'requests', request)
if known then
    local before, other = string.match(known, '(%S+) (%S+)')
    if before ~= asked then return {'duplicate', ''} end
    if may_answer(other) then return {'found', call('HGET', p .. 'job:' .. other, 'record')} end
end
local other = call('HGET', p .. 'digests', digest)
if other and may_answer(other) then
    answer(other)
    return {'found', call('HGET', p .. 'job:' .. other, 'record')}
end
local waiting = call('SCARD', p .. 'queued')
if waiting >= tonumber(max_queued) then return {'full', waiting} end
local number = call('INCR', p .. 'number')
call('HSET', key, 'number', number, 'entry', '')
call('ZADD', p .. 'numbers', number, id)
store(15)
answer(id)
return {'created', ''}
"""
)

FORGET = (
    _ALLOW_OOM
    + _COMMON
    + """
-- ARGV: id, revision
local id = ARGV[1]
local key = p .. 'job:' .. id
local revision, state, digest = unpack(call('HMGET', key, 'revision', 'state', 'digest'))
if revision ~= ARGV[2] then return 0 end
withdraw(id)
leave_digest(id, digest)
for _, request in ipairs(call('SMEMBERS', p .. 'bound:' .. id)) do call('HDEL', p .. 'requests', request) end
call('HINCRBY', p .. 'counts', state, -1)
call('SREM', p .. 'queued', id)
call('ZREM', p .. 'due', id)
call('ZREM', p .. 'numbers', id)
call('DEL', key, p .. 'events:' .. id, p .. 'bound:' .. id)
return 1
"""
)

PROMOTE = (
    _ALLOW_OOM
    + _COMMON
    + """
-- ARGV: now. Delayed jobs that may be claimed by now become ready.
for _, id in ipairs(call('ZRANGE', p .. 'delayed', '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, 100)) do
    call('ZREM', p .. 'delayed', id)
    announce(id)
end
"""
)

REPAIR = (
    _ALLOW_OOM
    + _COMMON
    + """
-- ARGV: idle limits of a message nobody works on and of a consumer without messages, both in ms
redis.pcall('XGROUP', 'CREATE', p .. 'ready', 'workers', '0', 'MKSTREAM')

-- Delivered, but the worker died before it could claim the job; or of a job that is gone.
for _, pending in ipairs(call('XPENDING', p .. 'ready', 'workers', 'IDLE', ARGV[1], '-', '+', 1000)) do
    local entry = pending[1]
    local message = call('XRANGE', p .. 'ready', entry, entry)[1]
    local id = message and message[2][2] or ''
    local state, current = unpack(call('HMGET', p .. 'job:' .. id, 'state', 'entry'))
    if current ~= entry or state == 'queued' then
        call('XACK', p .. 'ready', 'workers', entry)
        call('XDEL', p .. 'ready', entry)
    end
end

-- Waiting, but announced nowhere: its message was dropped above, or the stream was lost.
for _, id in ipairs(call('SMEMBERS', p .. 'queued')) do
    if not call('ZSCORE', p .. 'delayed', id) then
        local entry = call('HGET', p .. 'job:' .. id, 'entry')
        if entry == '' or #call('XRANGE', p .. 'ready', entry, entry) == 0 then announce(id) end
    end
end

-- Workers that are gone for good. Deleting a consumer deletes its pending messages: only one that has none.
for _, consumer in ipairs(call('XINFO', 'CONSUMERS', p .. 'ready', 'workers')) do
    local fields = {}
    for i = 1, #consumer, 2 do fields[consumer[i]] = consumer[i + 1] end
    if fields.pending == 0 and fields.idle > tonumber(ARGV[2]) then
        call('XGROUP', 'DELCONSUMER', p .. 'ready', 'workers', fields.name)
    end
end
"""
)
