-- Add rows to one stream, in order; behind a row that was refused, none of its aggregate is added.
-- KEYS[1]: the stream. ARGV: the length to trim to (0: never), then for each row the number of its aggregate
-- (0: none), the number of its fields and values, and these. Answers: '' for a row that was added, '-' for one
-- that was held back, else why it was refused.
local answers, stopped = {}, {}
local trim = tonumber(ARGV[1])
local at = 2
while at <= #ARGV do
    local aggregate, count = ARGV[at], tonumber(ARGV[at + 1])
    local command = { 'XADD', KEYS[1] }
    if trim > 0 then
        command = { 'XADD', KEYS[1], 'MAXLEN', '~', ARGV[1] }
    end
    command[#command + 1] = '*'
    for i = at + 2, at + 1 + count do
        command[#command + 1] = ARGV[i]
    end
    at = at + 2 + count
    if stopped[aggregate] then
        answers[#answers + 1] = '-'
    else
        local answer = redis.pcall(unpack(command))
        if type(answer) == 'table' and answer.err then
            answers[#answers + 1] = answer.err
            if aggregate ~= '0' then
                stopped[aggregate] = true
            end
        else
            answers[#answers + 1] = ''
        end
    end
end
return answers
