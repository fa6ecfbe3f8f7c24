-- Returns the decisions that each model's autoscaler reported last, each followed by the age of the
-- report in µs.

local answer, ages = {}, {}
local fields = redis.call('HGETALL', ROOT .. 'scaling')
for i = 1, #fields, 2 do
    local kind, model = fields[i]:match('^(%a+) (.*)$')
    if kind == 'moment' then ages[model] = digits(math.max(0, now() - fields[i + 1])) end
end
for i = 1, #fields, 2 do
    local kind, model = fields[i]:match('^(%a+) (.*)$')
    if kind == 'scaling' then
        answer[#answer + 1] = fields[i + 1]
        answer[#answer + 1] = ages[model]
    end
end
return answer
